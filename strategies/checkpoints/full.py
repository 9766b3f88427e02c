"""One file with everything, as Lightning's other strategies write and read it.

Writing takes two passes over the file. The first writes everything but the bytes of tensors, and
reserves a place for each tensor. The second copies each tensor to its place in a mapping of the
file. So a file of any size is written with the memory of one unit. Then the file is read once for
the checksums of its records, which :func:`load` compares.
"""

from __future__ import annotations

import mmap
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import set_default_mmap_options, skip_data

from ..state_dicts.collective_errors import CheckpointError, rank_and_world_size, run_on_all_ranks
from ..state_dicts.gather import gather_slices, replace_tensors, tensors_in
from ..support import profile_range
from .archive import changed, write_checksums
from .storage import begin, commit, remove


def save(checkpoint: dict[str, Any], path: Path, rank: int) -> None:
    """Write a Lightning checkpoint with the slices of all ranks; collective.

    Args:
        checkpoint: has the same :class:`~.slices.SlicedTensor` on all ranks. Everything else is
            written as rank 0 has it.
        path: of the file. A file that is there is replaced when the new one is complete.
        rank: of this process.

    Raises:
        CheckpointError: on all ranks; what was at ``path`` is still there.
    """
    action = f"Saving {path}"
    stage = path.parent
    places: dict[int, Tensor] = {}

    def prepare() -> None:
        nonlocal stage
        stage = begin(path)
        places.update(reserve(checkpoint, stage))

    try:
        with profile_range("prepare checkpoint"):
            run_on_all_ranks(action, prepare if rank == 0 else _do_nothing)
        with profile_range("write checkpoint"):
            gather_slices(checkpoint, rank, lambda tensor, value: places[id(tensor)].copy_(value))
        places.clear()  # unmap the file
        with profile_range("finish checkpoint"):
            run_on_all_ranks(action, (lambda: finish(stage, path)) if rank == 0 else _do_nothing)
    except CheckpointError:
        if rank == 0 and stage != path.parent:
            remove(stage)
        raise


def reserve(tree: Any, file: Path) -> dict[int, Tensor]:
    """Write a file with everything in ``tree`` but the values of slices and saved tensors.

    Returns:
        ``id`` of each slice or saved tensor -> a tensor mapped to the place of its value in the
        file; values copied to it are written to the file.

    Raises:
        OSError: the disk has no room.
        CheckpointError: a tensor is inside an object other than a dict, list or tuple, where
            :func:`~.gather.tensors_in` does not find it.
    """
    placeholders: dict[int, Tensor] = {}
    skeleton = replace_tensors(
        tree, lambda tensor: placeholders.setdefault(id(tensor), _make_placeholder(tensor))
    )
    with skip_data():
        torch.save(skeleton, file)
    if hasattr(os, "posix_fallocate"):
        # hazard: writing to a mapping of a file that the disk has no room for kills the process
        with open(file, "r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, file.stat().st_size)
    with set_default_mmap_options(mmap.MAP_SHARED):
        # this function wrote the file, so it names no foreign code
        mapped = torch.load(file, mmap=True, map_location="cpu", weights_only=False)
    pairs = list(zip(tensors_in(skeleton, Tensor), tensors_in(mapped, Tensor), strict=True))
    with zipfile.ZipFile(file) as archive:
        storage_count = sum("/data/" in name for name in archive.namelist())
    if storage_count > len({tensor.untyped_storage()._cdata for tensor, _ in pairs}):
        raise CheckpointError(
            "the checkpoint has tensors inside of objects. Put them into dicts or lists in"
            " `on_save_checkpoint`."
        )
    keys = {id(tensor): key for key, tensor in placeholders.items()}
    places = {}
    for tensor, place in pairs:
        if id(tensor) in keys:
            places[keys[id(tensor)]] = place
        else:
            place.copy_(tensor)
    return places


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
