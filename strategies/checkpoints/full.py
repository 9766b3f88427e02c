"""One file with everything, as Lightning's other strategies write and read it.

Writing is two passes over the file: first everything but the bytes of tensors, which get their
places; then each tensor is copied to its place in a mapping of the file. So a file of any size is
written with the memory of one unit. Then it is read once for the checksums of its records, which
whoever loads it compares.
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

from ..state_dicts.collective_errors import CheckpointError, rank_and_world_size, together
from ..state_dicts.gather import gather, replace, tensors_in
from .archive import changed, seal
from .storage import begin, commit, remove


def save(checkpoint: dict[str, Any], path: Path, rank: int) -> None:
    """Write a Lightning checkpoint with the slices of all ranks; collective.

    Args:
        checkpoint: with the same :class:`~.slices.SlicedTensor` on all ranks. Rank 0's is written.
        path: of the file. What is there is replaced when the new one is whole.
        rank: this one.

    Raises:
        CheckpointError: on all ranks; what was at ``path`` is still there.
    """
    doing = f"Saving {path}"
    stage = path.parent
    spaces: dict[int, Tensor] = {}

    def prepare() -> None:
        nonlocal stage
        stage = begin(path)
        spaces.update(reserve(checkpoint, stage))

    try:
        together(doing, prepare if rank == 0 else _nothing)
        gather(checkpoint, rank, lambda tensor, whole: spaces[id(tensor)].copy_(whole))
        spaces.clear()
        together(doing, (lambda: finish(stage, path)) if rank == 0 else _nothing)
    except CheckpointError:
        if rank == 0 and stage != path.parent:
            remove(stage)
        raise


def reserve(tree: Any, file: Path) -> dict[int, Tensor]:
    """Write a file with everything in ``tree`` but the values of slices and saved tensors.

    Returns:
        ``id`` of each of these -> the place in the file for its value; what is copied there is
        written.

    Raises:
        OSError: there is no room.
        CheckpointError: a tensor is inside an object that is no dict, list or tuple, where it would
            be overlooked.
    """
    memory: dict[int, Tensor] = {}
    skeleton = replace(tree, lambda tensor: memory.setdefault(id(tensor), _untouched(tensor)))
    with skip_data():
        torch.save(skeleton, file)
    if hasattr(os, "posix_fallocate"):
        # writing to a mapping of a file that the disk has no room for kills the process
        with open(file, "r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, file.stat().st_size)
    with set_default_mmap_options(mmap.MAP_SHARED):
        # of our own making
        mapped = torch.load(file, mmap=True, map_location="cpu", weights_only=False)
    pairs = list(zip(tensors_in(skeleton, Tensor), tensors_in(mapped, Tensor), strict=True))
    with zipfile.ZipFile(file) as archive:
        stored = sum("/data/" in name for name in archive.namelist())
    if stored > len({tensor.untyped_storage()._cdata for tensor, _ in pairs}):
        raise CheckpointError(
            "the checkpoint has tensors inside of objects. Put them into dicts or lists in"
            " `on_save_checkpoint`."
        )
    ours = {id(tensor): key for key, tensor in memory.items()}
    spaces = {}
    for tensor, place in pairs:
        if id(tensor) in ours:
            spaces[ours[id(tensor)]] = place
        else:
            place.copy_(tensor)
    return spaces


def finish(stage: Path, path: Path) -> None:
    """Make a file that :func:`reserve` began, and all of whose places are filled, the one at
    ``path``.
    """
    seal(stage)
    commit(stage, path)


def _untouched(tensor: Tensor) -> Tensor:
    """Memory of the tensor's shape that the system need not provide, because nobody looks at it."""
    stride = torch.empty(tensor.shape, device="meta").stride()
    storage = torch.UntypedStorage(tensor.numel() * tensor.element_size())
    return torch.empty(0, dtype=tensor.dtype, device=storage.device).set_(
        storage, 0, tensor.size(), stride
    )


def _nothing() -> None:
    pass


def load(path: Path, weights_only: bool) -> dict[str, Any]:
    """Open a full checkpoint; its tensors are mapped into memory and read where they are used;
    collective.

    Raises:
        CheckpointError: on all ranks, if it cannot be read or is not as it was written.
    """
    found: dict[str, Any] = {}
    together(f"Loading {path}", lambda: found.update(_open(path, weights_only)))
    return found


def _open(path: Path, weights_only: bool) -> dict[str, Any]:
    rank, world_size = rank_and_world_size()
    found = changed(path, rank, world_size)
    if found is not None:
        raise CheckpointError(found)
    return torch.load(
        path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=weights_only
    )
