"""Directories in the format of torch.distributed.checkpoint, written by all ranks.

The layout is the one of Lightning's ``ModelParallelStrategy`` (FSDP2)::

    .metadata          which part of which tensor lies where
    __0_0.distcp, ...  the parts that rank 0, ... wrote
    meta.pt            everything that is no weight and no optimizer state: loops, callbacks,
                       loaders, random states, ...
    manifest.json      sizes and checksums of these files; ours alone

and so are the names in it: ``state_dict.<key>``, ``optimizer_<index>.state.<parameter>.<key>`` and
``optimizer_<index>.param_groups.<index>.<option>``.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future as Upload
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..state_dicts.collective_errors import CheckpointError, describe, rank_and_world_size, together
from ..state_dicts.gather import tensors_in
from ..state_dicts.slices import SlicedTensor
from .manifest import MANIFEST, File, Manifest, measure
from .storage import commit, make_folder, remove, stage_of, sync

INDEX = ".metadata"
TRAINER_STATE = "meta.pt"
OTHERS = "others"  # sharded tensors that are neither the model's nor an optimizer's
_MARK = "zero3_sharded"  # {_MARK: name} in the trainer state stands for such a tensor


@dataclass
class Prepared:
    """What this rank is to write.

    Attributes:
        path: of the directory, on a file system that all ranks see.
        state: nested, with the rank's slices.
        rest: ``meta.pt``, which rank 0 writes.
        manifest: without files.
    """

    path: Path
    state: dict[str, Any]
    rest: bytes
    manifest: Manifest


def prepare(checkpoint: dict[str, Any], path: Path) -> Prepared:
    """Take a Lightning checkpoint apart; collective.

    Args:
        checkpoint: as Lightning makes it, with a :class:`~.slices.SlicedTensor` for each sharded
            tensor, wherever it is.
        path: where it will be.

    Raises:
        CheckpointError: on all ranks, if something in it cannot be pickled.
    """
    rank, world_size = rank_and_world_size()
    state = {"state_dict": checkpoint["state_dict"]}
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer
    rest = {
        key: value
        for key, value in checkpoint.items()
        if key not in ("state_dict", "optimizer_states")
    }
    if any(True for _ in tensors_in(rest, SlicedTensor)):
        state[OTHERS] = {}  # averages of weights, and what else callbacks keep
        rest = _take_slices(rest, (), state[OTHERS])
    packed = io.BytesIO()
    together(f"Saving {path}", lambda: None if rank else torch.save(rest, packed))
    manifest = Manifest(world_size, checkpoint.get("epoch", 0), checkpoint.get("global_step", 0))
    return Prepared(path, state, packed.getvalue(), manifest)


def _take_slices(tree: Any, path: tuple[str, ...], into: dict[str, Any]) -> Any:
    """``tree`` with every slice moved to ``into`` and a mark in its place."""
    if isinstance(tree, SlicedTensor):
        name = ".".join(path)
        into[name] = tree
        return {_MARK: name}
    if isinstance(tree, dict):
        return {key: _take_slices(item, (*path, str(key)), into) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_take_slices(item, (*path, str(k)), into) for k, item in enumerate(tree))
    return tree


def put_back(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Undo :func:`_take_slices`."""
    if isinstance(tree, dict):
        return (
            tensors[tree[_MARK]]
            if tree.keys() == {_MARK}
            else {k: put_back(item, tensors) for k, item in tree.items()}
        )
    if type(tree) in (list, tuple):
        return type(tree)(put_back(item, tensors) for item in tree)
    return tree


def save(prepared: Prepared) -> None:
    """Write a checkpoint, every rank its part; collective. What is at its path is replaced when the
    new one is whole.

    Raises:
        CheckpointError: on all ranks; what was at the path is still there.
    """
    with saving(prepared.path):
        dcp.save(prepared.state, storage_writer=_Writer(prepared), planner=_planner())


def save_copies(prepared: Prepared, group: dist.ProcessGroup | None) -> Upload[Metadata]:
    """Copy this rank's part to CPU memory and let a thread write it; collective.

    Args:
        prepared: this rank's part.
        group: of all ranks, for this alone, on gloo: the training's own collectives go on
            meanwhile.

    Returns:
        the end of the save, to be looked at inside :func:`saving`.

    Raises:
        CheckpointError: on all ranks, if there is no room for the copies.
    """
    if group is None:  # in the thread, where filters cannot be changed for a moment only
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    upload = dcp.async_save(
        prepared.state,
        storage_writer=_Writer(prepared),
        planner=_planner(),
        process_group=group,
        async_stager=_Copies(),
    )
    assert isinstance(upload, Upload)
    return upload


@contextmanager
def saving(path: Path) -> Iterator[None]:
    """Around the end of a save: one that failed is an error of all ranks, and leaves nothing
    behind.

    Raises:
        CheckpointError: it failed.
    """
    try:
        with torch_errors(f"Saving {path}"):
            yield
    except CheckpointError:
        if not dist.is_initialized() or dist.get_rank() == 0:
            remove(stage_of(path))
        raise


@contextmanager
def torch_errors(doing: str) -> Iterator[None]:
    """torch raises what any rank raised on all of them, as an exception that is no `Exception`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as found:
        rank, (error, _) = next(iter(found.failures.items()))
        raise CheckpointError(f"{doing} failed on rank {rank}: {describe(error)}") from error


def _planner() -> DefaultSavePlanner:
    # Buffers may differ between ranks (running statistics do): rank 0's count, as in every other
    # strategy.
    return DefaultSavePlanner(dedup_save_to_lowest_rank=True)


class _Copies(AsyncStager):
    """Copies this rank's parts and nothing else. torch's own stagers want tensors that have values,
    or copy whole storages.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        copies: dict[str, Any] = {}
        together(
            "Copying shards for a background save", lambda: copies.update(_copied(state_dict, {}))
        )
        return copies


def _copied(tree: Any, memory: dict[int, Tensor]) -> Any:
    if isinstance(tree, SlicedTensor):
        return memory.setdefault(id(tree), tree.copied())
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: _copied(item, memory) for key, item in tree.items()}
    return (
        type(tree)(_copied(item, memory) for item in tree) if type(tree) in (list, tuple) else tree
    )


class _Written(list[WriteResult]):
    """What a rank wrote, and what its files are like."""

    files: dict[str, File]


class _Writer(FileSystemWriter):
    """Writes beside the path, adds what is ours, and gives the directory its name when all of it is
    there.

    torch calls one method after the other on all ranks, those about all plans and the finish on the
    coordinator alone, and raises everywhere what any of them raised anywhere.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared, self._stage = prepared, stage_of(prepared.path)
        super().__init__(self._stage)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # every rank would create the folder

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        make_folder(self._prepared.path)
        self._prepared.manifest.write(self._stage)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not (self._stage / MANIFEST).is_file():
            raise CheckpointError(
                f"{self._stage} was created by rank 0 and is not there. All ranks must see the same"
                " file system."
            )
        written = _Written(super().write_data(plan, planner).wait())
        written.files = _measured(self._stage.glob(f"{plan.storage_data.prefix}*"))
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[_Written]) -> None:
        super().finish(metadata, results)
        index, rest, manifest = (
            self._stage / INDEX,
            self._stage / TRAINER_STATE,
            self._prepared.manifest,
        )
        rest.write_bytes(self._prepared.rest)
        sync(rest)
        for files in (*(written.files for written in results), _measured([index, rest])):
            manifest.files.update(files)
        manifest.write(self._stage)
        commit(self._stage, self._prepared.path)


def _measured(files: Any) -> dict[str, File]:
    return {file.name: measure(file) for file in files}
