"""One file with everything, as Lightning's other strategies write and read it.

Writing takes two passes over the file. The first writes everything but the bytes of tensors, and
reserves a place for each tensor. The second copies each tensor to its place in a mapping of the
file. So a file of any size is written with the memory of one unit. Then the file is read once for
the checksums of its records, which :func:`load` compares.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import re
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.serialization import DEFAULT_PROTOCOL, skip_data

from ..state_dicts.collective_errors import CheckpointError, rank_and_world_size, run_on_all_ranks
from ..state_dicts.gather import gather_slices, replace_tensors, tensors_in
from ..support import profile_range
from .archive import changed, find_data, write_checksums
from .storage import begin, commit, discard, stage_of


def save(checkpoint: dict[str, Any], path: Path, rank: int) -> None:
    """Write a Lightning checkpoint with the slices of all ranks; collective.

    Args:
        checkpoint: has the same :class:`~.state_dicts.slices.SlicedTensor` on all ranks. Everything
            else is written as rank 0 has it.
        path: of the file. A file that is there is replaced when the new one is complete.
        rank: of this process.

    Raises:
        CheckpointError: on all ranks; what was at ``path`` is still there.
    """
    action = f"Saving {path}"
    places: dict[int, Tensor] = {}

    def prepare() -> None:
        places.update(reserve(checkpoint, begin(path)))

    try:
        with profile_range("prepare checkpoint"):
            run_on_all_ranks(action, prepare if rank == 0 else _do_nothing)
        with profile_range("write checkpoint"):
            gather_slices(checkpoint, rank, lambda tensor, value: places[id(tensor)].copy_(value))
        places.clear()  # unmap the file
        with profile_range("finish checkpoint"):
            end = partial(finish, stage_of(path), path) if rank == 0 else _do_nothing
            run_on_all_ranks(action, end)
    except CheckpointError:
        if rank == 0:
            discard(path)
        raise


def reserve(tree: Any, file: Path) -> dict[int, Tensor]:
    """Write a file with everything in ``tree`` but the values of slices and saved tensors.

    Returns:
        ``id`` of each slice or saved tensor -> a tensor mapped to the place of its value in the
        file; values copied to it are written to the file.

    Raises:
        OSError: the disk has no room.
        CheckpointError: a tensor is inside an object other than a dict, list or tuple, where
            :func:`~.state_dicts.gather.tensors_in` does not find it.
    """
    placeholders: dict[int, Tensor] = {}
    skeleton = replace_tensors(
        tree, lambda tensor: placeholders.setdefault(id(tensor), _make_placeholder(tensor))
    )
    # hazard: others may put something else under this name. The file is a new one, and is not
    # opened again to find the places in it.
    with open(file, "x+b") as stream:
        with skip_data():
            torch.save(skeleton, stream)
        size = stream.seek(0, os.SEEK_END)
        if hasattr(os, "posix_fallocate"):
            # hazard: writing to a mapping of a file that the disk has no room for kills the process
            os.posix_fallocate(stream.fileno(), 0, size)
        mapping = mmap.mmap(stream.fileno(), size)
        records = _find_records(stream)
    numbers = _StorageNumbers()
    numbers.dump(skeleton)
    # tensors on the meta device have no record
    tensors = [tensor for tensor in tensors_in(skeleton, Tensor) if not tensor.is_meta]
    if len(numbers.known) > len({tensor.untyped_storage()._cdata for tensor in tensors}):
        raise CheckpointError(
            "the checkpoint has tensors inside of objects. Put them into dicts or lists in"
            " `on_save_checkpoint`."
        )
    keys = {id(tensor): key for key, tensor in placeholders.items()}
    places = {}
    for tensor in tensors:
        record = records[numbers.known[tensor.untyped_storage()._cdata]]
        place = _map_tensor(mapping, *record, tensor)
        if id(tensor) in keys:
            places[keys[id(tensor)]] = place
        else:
            # as it lies there: a conjugated view says so in the file
            place.untyped_storage().copy_(tensor.untyped_storage())
    return places


class _StorageNumbers(pickle.Pickler):
    """Numbers storages as ``torch.save`` does, in the order in which pickle comes to them."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), protocol=DEFAULT_PROTOCOL)
        self.known: dict[int, int] = {}  # address of the storage's object -> number of its record

    def persistent_id(self, obj: Any) -> int | None:
        if not (torch.is_storage(obj) or isinstance(obj, torch.TypedStorage)):
            return None
        storage = getattr(obj, "_untyped_storage", obj)
        return self.known.setdefault(storage._cdata, len(self.known))


def _find_records(stream: BinaryIO) -> dict[int, tuple[int, int]]:
    """Return number of each storage in a file of ``torch.save`` -> (offset, size) in bytes."""
    with zipfile.ZipFile(stream) as archive:
        return {
            int(record.filename.rpartition("/")[2]): (find_data(stream, record), record.file_size)
            for record in archive.infolist()
            if re.fullmatch(r"[^/]+/data/\d+", record.filename)
        }


def _map_tensor(mapping: mmap.mmap, offset: int, size: int, like: Tensor) -> Tensor:
    """Return a tensor like ``like`` whose storage is ``size`` bytes of the mapped file."""
    if size != like.untyped_storage().nbytes():
        raise CheckpointError("torch.save wrote tensors in another order than is expected")
    if not size:
        return like.clone()
    memory = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=offset)
    return torch.empty(0, dtype=like.dtype).set_(
        memory.untyped_storage(), like.storage_offset(), like.size(), like.stride()
    )


def finish(stage: Path, path: Path) -> None:
    """Add checksums to a file of :func:`reserve` whose places are filled; move it to ``path``."""
    write_checksums(stage)
    commit(stage, path)


def _make_placeholder(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape that is never read or written.

    So the operating system need not provide memory for it.
    """
    stride = torch.empty(tensor.shape, device="meta").stride()
    storage = torch.UntypedStorage(tensor.numel() * tensor.element_size())
    return torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(
        storage, 0, tensor.size(), stride
    )


def _do_nothing() -> None:
    pass


def load(path: Path, weights_only: bool) -> dict[str, Any]:
    """Open a full checkpoint, whose tensors are mapped and read when they are used; collective.

    Raises:
        CheckpointError: on all ranks, if the file cannot be read or is not as it was written.
    """
    checkpoint: dict[str, Any] = {}
    run_on_all_ranks(f"Loading {path}", lambda: checkpoint.update(_open_file(path, weights_only)))
    return checkpoint


def _open_file(path: Path, weights_only: bool) -> dict[str, Any]:
    """Open the file after comparing this rank's share of its checksums."""
    rank, world_size = rank_and_world_size()
    fault = changed(path, rank, world_size)
    if fault is not None:
        raise CheckpointError(fault)
    return torch.load(
        path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=weights_only
    )
