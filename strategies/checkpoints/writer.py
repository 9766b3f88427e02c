"""Write directories in the format of torch.distributed.checkpoint, all ranks together.

The layout is the one of Lightning's ``ModelParallelStrategy`` (FSDP2)::

    .metadata          which part of which tensor lies where
    __0_0.distcp, ...  the parts that rank 0, ... wrote
    meta.pt            everything that is no weight and no optimizer state: loops, callbacks,
                       loaders, random states, ...
    manifest.json      sizes and checksums of these files; FSDP2 has none

The names in the index are FSDP2's, too::

    state_dict.<key>
    optimizer_<index>.state.<parameter>.<key>
    optimizer_<index>.param_groups.<index>.<option>
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..data import add_entries
from ..state_dicts.collective_errors import (
    CheckpointError,
    describe_error,
    rank_and_world_size,
    run_on_all_ranks,
)
from ..state_dicts.gather import tensors_in
from ..state_dicts.slices import SlicedTensor
from ..support import profile_range
from .manifest import INDEX, MANIFEST, File, Manifest, measure
from .storage import commit, discard, make_folder, sync

TRAINER_STATE = "meta.pt"
OTHERS = "others"  # sharded tensors that are neither the model's nor an optimizer's
_MARK = "zero3_sharded"  # {_MARK: name} in the trainer state stands for such a tensor


class ShardedSave:
    """A directory that is being written; making it is collective.

    Args:
        checkpoint: as Lightning makes it, with a :class:`~.state_dicts.slices.SlicedTensor` for
            each sharded tensor, wherever the tensor stands.
        path: of the directory, on a file system that all ranks see. A checkpoint that is there is
            replaced when the new one is complete.

    Raises:
        CheckpointError: on all ranks, if rank 0 cannot pickle something in the checkpoint.

    Attributes:
        state: nested, with the rank's slices.
        stage: where it is written first.
        rest: bytes of ``meta.pt``, which rank 0 writes; empty on the other ranks.
        manifest: without files.
    """

    def __init__(self, checkpoint: dict[str, Any], path: Path) -> None:
        self.path = path
        rank, world_size = rank_and_world_size()
        self.state = {"state_dict": checkpoint["state_dict"]}
        for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
            self.state[f"optimizer_{index}"] = optimizer
        rest = {
            key: value
            for key, value in checkpoint.items()
            if key not in ("state_dict", "optimizer_states")
        }
        if any(True for _ in tensors_in(rest, SlicedTensor)):
            self.state[OTHERS] = {}  # averages of weights, and other slices in callback states
            rest = _take_slices(rest, (), self.state[OTHERS])
        # torch's format takes containers apart, and makes the keys of dicts texts
        weights = checkpoint["state_dict"]
        whole = {key: value for key, value in weights.items() if not isinstance(value, Tensor)}
        if whole:
            add_entries(rest, extra_states=whole)
        packed = io.BytesIO()

        def prepare() -> Path | None:
            if rank:
                return None
            torch.save(rest, packed)
            return make_folder(path)

        with profile_range("prepare checkpoint"):
            stage = run_on_all_ranks(f"Saving {path}", prepare)[0]
        assert stage is not None
        self.stage, self.rest = stage, packed.getvalue()
        self.manifest = Manifest(
            world_size, checkpoint.get("epoch", 0), checkpoint.get("global_step", 0)
        )

    def copy_to_cpu(self) -> None:
        """Copy this rank's part, which may change from now on; collective."""

        def copy() -> None:
            self.state = _copied(self.state, {})

        with self._failing(), profile_range("copy checkpoint"):
            run_on_all_ranks("Copying shards for a background save", copy)

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write this rank's part, and give the directory its name when all have; collective.

        Args:
            group: of all ranks, for the exchanges; by default the one of the run.

        Raises:
            CheckpointError: on all ranks; what was at the path is still there.
        """
        with self._failing(), profile_range("write checkpoint"):
            dcp.save(
                self.state,
                storage_writer=_Writer(self),
                # Every rank has all buffers, and they may differ (running statistics do): rank 0's
                # are saved, as by every other strategy.
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=group,
            )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                yield
        except (CheckpointError, CheckpointException) as raised:
            if rank_and_world_size()[0] == 0:
                discard(self.stage)
            if isinstance(raised, CheckpointError):
                raise
            # torch's, on all ranks; no `except Exception` catches it
            rank, (error, _) = next(iter(raised.failures.items()))
            raise CheckpointError(
                f"Saving {self.path} failed on rank {rank}: {describe_error(error)}"
            ) from error


def _take_slices(tree: Any, path: tuple[str, ...], into: dict[str, Any]) -> Any:
    """Move every slice in ``tree`` to ``into``; return the tree with marks in their places."""
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
    """Undo :func:`_take_slices`: replace each mark by its tensor."""
    if isinstance(tree, dict):
        return (
            tensors[tree[_MARK]]
            if tree.keys() == {_MARK}
            else {k: put_back(item, tensors) for k, item in tree.items()}
        )
    if type(tree) in (list, tuple):
        return type(tree)(put_back(item, tensors) for item in tree)
    return tree


def _copied(tree: Any, memory: dict[int, Tensor]) -> Any:
    if isinstance(tree, SlicedTensor):
        return memory.setdefault(id(tree), tree.copy_to_cpu())
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: _copied(item, memory) for key, item in tree.items()}
    return (
        type(tree)(_copied(item, memory) for item in tree) if type(tree) in (list, tuple) else tree
    )


class _Written(list[WriteResult]):
    """torch's results of one rank's writes, with sizes and checksums of the rank's files."""

    files: dict[str, File]  # by name


class _Writer(FileSystemWriter):
    """Write beside the path, add ``meta.pt`` and the manifest, then give the directory its name.

    torch calls the methods in the order in which they stand here: ``prepare_local_plan`` and
    ``write_data`` on all ranks, ``prepare_global_plan`` and ``finish`` on the coordinator (rank 0)
    alone. An error in any of them on any rank is raised on all ranks.
    """

    def __init__(self, save: ShardedSave) -> None:
        self._save, self._stage = save, save.stage
        super().__init__(self._stage)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # `FileSystemWriter.prepare_local_plan` would create the folder on every rank
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self._save.manifest.write(self._stage)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not (self._stage / MANIFEST).is_file():
            raise CheckpointError(
                f"{self._stage} was created by rank 0 and is not there. All ranks must see the same"
                " file system, as the same user."
            )
        written = _Written(super().write_data(plan, planner).wait())
        written.files = _measured(self._stage.glob(f"{plan.storage_data.prefix}*"))
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: Any) -> None:  # of `_Written`
        super().finish(metadata, results)
        index, rest = self._stage / INDEX, self._stage / TRAINER_STATE
        manifest = self._save.manifest
        rest.write_bytes(self._save.rest)
        sync(rest)
        for files in (*(written.files for written in results), _measured([index, rest])):
            manifest.files.update(files)
        manifest.write(self._stage)
        commit(self._stage, self._save.path)


def _measured(files: Any) -> dict[str, File]:
    return {file.name: measure(file) for file in files}
