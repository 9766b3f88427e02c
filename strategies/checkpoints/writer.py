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
from functools import cache
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
from torch.utils._pytree import tree_map, tree_map_only
from typing_extensions import override

from ..data import add_entries
from ..state_dicts.collective_errors import (
    CheckpointError,
    describe_error,
    rank_and_world_size,
    run_on_all_ranks,
)
from ..state_dicts.gather import replace_tensors
from ..state_dicts.slices import SlicedTensor
from ..support import profile_range
from .manifest import INDEX, MANIFEST, Files, measure, write_manifest
from .storage import commit, discard, make_folder, sync

TRAINER_STATE = "meta.pt"
OTHERS = "others"  # sharded tensors that are neither the model's nor an optimizer's
_MARK = "zero3_sharded"  # {_MARK: name} in the trainer state stands for such a tensor


class ShardedSave(FileSystemWriter):
    """A directory that is being written; making it is collective.

    torch calls the methods from ``prepare_local_plan`` on in the order in which they stand here:
    that one and ``write_data`` on all ranks, ``finish`` on the coordinator (rank 0) alone. An error
    in any of them on any rank is raised on all ranks. Its ``path`` is where it writes first.

    Args:
        checkpoint: as Lightning makes it, with a :class:`~.state_dicts.slices.SlicedTensor` for
            each sharded tensor, wherever the tensor stands.
        path: of the directory, on a file system that all ranks see. A checkpoint that is there is
            replaced when the new one is complete.

    Raises:
        CheckpointError: on all ranks, if rank 0 cannot pickle something in the checkpoint.
    """

    path: Path

    def __init__(self, checkpoint: dict[str, Any], path: Path) -> None:
        self._target, self._action = path, f"Saving {path}"
        self._rank, world_size = rank_and_world_size()
        weights, optimizers = checkpoint["state_dict"], checkpoint.get("optimizer_states", [])
        # nested, with the rank's slices
        self._state = {f"optimizer_{index}": state for index, state in enumerate(optimizers)}
        self._state["state_dict"] = weights
        others: dict[str, Tensor] = {}

        def take(tensor: Any) -> dict[str, str]:
            name = f"{len(others)}.{tensor.label}"
            others[name] = tensor
            return {_MARK: name}

        rest = {
            key: replace_tensors(value, take)
            for key, value in checkpoint.items()
            if key not in ("state_dict", "optimizer_states")
        }
        if others:  # averages of weights, and other slices in callback states
            self._state[OTHERS] = others
        # torch's format takes containers apart, and makes the keys of dicts texts
        add_entries(
            rest,
            extra_states={k: v for k, v in weights.items() if not isinstance(v, Tensor)},
            param_groups=[state["param_groups"] for state in optimizers],
        )
        packed = io.BytesIO()

        def prepare() -> Path | None:
            if self._rank:
                return None
            torch.save(rest, packed)
            return make_folder(path)

        with profile_range("prepare checkpoint"):
            stage = run_on_all_ranks(self._action, prepare)[0]
        assert stage is not None
        super().__init__(stage)
        self._rest = packed.getvalue()  # of ``meta.pt``, on rank 0
        self._about = {key: checkpoint.get(key, 0) for key in ("epoch", "global_step")}
        self._about["world_size"] = world_size
        # of `dcp.save`. hazard: where a thread calls that, to put back the filters that there were
        # before would undo what others change meanwhile
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def copy_to_cpu(self) -> None:
        """Copy this rank's part, which may change from now on; local."""

        @cache
        def copied(tensor: Tensor) -> Tensor:
            if isinstance(tensor, SlicedTensor):
                return tensor.copy_to_cpu()
            return tensor.detach().to("cpu", copy=True)

        self._state = tree_map_only(Tensor, copied, self._state)

    def write(self, group: dist.ProcessGroup | None = None) -> None:
        """Write this rank's part, and give the directory its name when all have; collective.

        Args:
            group: of all ranks, for the exchanges; by default the one of the run.

        Raises:
            CheckpointError: on all ranks; what was at the path is still there.
        """
        with self.failing(), profile_range("write checkpoint"):
            dcp.save(
                self._state,
                storage_writer=self,
                # Every rank has all buffers, and they may differ (running statistics do): rank 0's
                # are saved, as by every other strategy.
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=group,
            )

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Delete what is begun if the body fails on any rank."""
        try:
            yield
        except (CheckpointError, CheckpointException) as raised:
            if not self._rank:
                discard(self.path)
            if isinstance(raised, CheckpointError):
                raise
            # torch's, on all ranks; no `except Exception` catches it
            rank, (error, _) = next(iter(raised.failures.items()))
            raise CheckpointError(
                f"{self._action} failed on rank {rank}: {describe_error(error)}"
            ) from error

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # `FileSystemWriter.prepare_local_plan` would create the folder on every rank, and a rank
        # that does not see that of rank 0 would write to its own
        return plan

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written = _Written(super().write_data(plan, planner).wait())
        written.files = _measured(self.path.glob(f"{plan.storage_data.prefix}*"))
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    @override
    def finish(self, metadata: Metadata, results: Any) -> None:  # of `_Written`
        super().finish(metadata, results)
        index, rest = self.path / INDEX, self.path / TRAINER_STATE
        rest.write_bytes(self._rest)
        files = _measured([index, rest])
        for written in results:
            files |= written.files
        write_manifest(self.path, files, **self._about)
        for file in (rest, self.path / MANIFEST):
            sync(file)
        commit(self.path, self._target)


class _Written(list[WriteResult]):
    """torch's results of one rank's writes, with sizes and checksums of the rank's files."""

    files: Files


def _measured(files: Any) -> Files:
    return {file.name: measure(file) for file in files}


def put_back(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Replace each mark of a slice by its tensor."""

    def is_mark(item: Any) -> bool:
        return isinstance(item, dict) and item.keys() == {_MARK}

    return tree_map(lambda x: tensors[x[_MARK]] if is_mark(x) else x, tree, is_leaf=is_mark)
