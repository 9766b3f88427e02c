"""Batches of an `IterableDataset`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..support.random_states import derive_seed
from .base_feed import Pairs, close_loader, copy_loader
from .no_batch import NoBatch
from .options import DataOptions, Stage
from .order import RowPlan
from .seeding import return_unchanged
from .stream import EndedTurn, StreamPosition, StreamShard, WorkerBatch, is_stateful


class StreamFeed:
    """Batches of an `IterableDataset`; the position is a `StreamPosition`."""

    def __init__(
        self,
        loader: DataLoader,
        options: DataOptions,
        stage: Stage,
        rank: int,
        world: int,
        seed: int,
        label: str,
    ) -> None:
        self.label = label
        self.rank = rank
        self.seed = seed
        is_own = options.streams == "own"
        self.is_sharded_by_user = is_own
        self.shape = self._read_shape(loader, options, stage, 1 if is_own else world)
        ranks = range(world) if options.sharding == "dispatch" else [0 if is_own else rank]
        self.row_samples = self.shape.batch * world
        collate = None if loader.batch_size is None else loader.collate_fn
        needs_padding = stage != "fit" and not is_own and not hasattr(loader.dataset, "__len__")
        self.shard = StreamShard(
            loader.dataset,
            self.shape,
            ranks,
            collate,
            options.per_sample_seed,
            label,
            needs_padding,
        )
        # Of a loader with a batch size, `StreamShard` calls the user's `collate_fn` itself.
        convert = _ConvertBatch(loader.collate_fn) if collate is None else return_unchanged
        self.loader = copy_loader(
            loader,
            dataset=self.shard,
            batch_size=None,
            batch_sampler=None,
            drop_last=False,
            collate_fn=convert,
            generator=torch.Generator(),
        )
        self.user_dataset: Any = loader.dataset
        self.workers = loader.num_workers
        self._begin_state: Any = None  # the user's dataset when the newest pass began
        self._rewind_state: Any = None  # the state from which the next pass begins again

    def _read_shape(
        self, loader: DataLoader, options: DataOptions, stage: Stage, world: int
    ) -> RowPlan:
        batch = loader.batch_size or 1
        if options.sharding == "split" and world > 1:
            if batch % world:
                raise ValueError(
                    f'{self.label}: sharding="split" cuts each batch in {world} equal parts, but'
                    f" batch_size is {loader.batch_size}.\nUse a multiple of {world}, or"
                    ' sharding="batch".'
                )
            batch //= world
        return RowPlan(0, batch, world, options.tail_for(stage, world), loader.drop_last)

    def start(
        self,
        epoch: int,
        cycle: int,
        position: StreamPosition | None,
        is_new_epoch: bool,
        salt: int = 0,
    ) -> Pairs:
        """See `Feed`."""
        position = position or StreamPosition()
        if self._rewind_state is not None and not position.marks:
            mark = {"read": 0, "state": self._rewind_state, "begin": self._rewind_state}
            position, is_new_epoch = StreamPosition({0: (mark, 0, False)}), True
        is_dataset_kept = self.workers == 0 or self.loader.persistent_workers
        if is_new_epoch and not is_dataset_kept:
            # Fresh workers copy the main process's dataset, which the last epoch did not move.
            position = StreamPosition()
        self._rewind_state = None
        self._begin_state = self._save_begin_state(position, is_new_epoch)
        if position.marks:
            self.close()  # persistent workers do not see a new position
        owner = self.rank if self.is_sharded_by_user else 0
        seed = derive_seed(self.seed, epoch, cycle, salt, owner)
        self.shard.begin_pass(epoch, position, is_new_epoch, seed)
        self.loader.generator.manual_seed(
            derive_seed(self.seed, epoch, cycle, self.rank, _items_read(position))
        )
        reached = StreamPosition() if is_new_epoch else position
        for worker_batch in iter(self.loader):
            if isinstance(worker_batch, EndedTurn):
                continue
            assert isinstance(worker_batch, WorkerBatch)
            reached = reached.advance(worker_batch, self.workers)
            batch = worker_batch.batch
            del worker_batch
            yield batch, reached
            del batch

    def _save_begin_state(self, position: StreamPosition, is_new_epoch: bool) -> Any:
        """Save the user's dataset as a pass begins; None if workers read copies of the dataset."""
        if self.workers > 0 or not is_stateful(self.user_dataset):
            return None
        mark, _, _ = position.marks.get(0, (None, 0, False))
        if mark is not None:
            return mark["state"] if is_new_epoch else mark["begin"]
        return copy.deepcopy(self.user_dataset.state_dict())

    def batches_per_rank(self) -> list[int] | None:
        """See `Feed`. The counts suppose that each of n workers reads every n-th item, as usual."""
        if self.is_sharded_by_user or not hasattr(self.user_dataset, "__len__"):
            return None
        return [
            sum(plan.batches(rank) for plan in self._worker_plans())
            for rank in range(self.shape.world)
        ]

    def _worker_plans(self) -> list[RowPlan]:
        size, workers = len(self.user_dataset), max(1, self.workers)
        shape = self.shape
        return [
            RowPlan(
                math.ceil(max(0, size - w) / workers),
                shape.batch,
                shape.world,
                shape.tail,
                shape.drop_last,
            )
            for w in range(workers)
        ]

    def length(self) -> int | None:
        """See `Feed`."""
        if not hasattr(self.user_dataset, "__len__"):
            return None
        return sum(
            plan.batches(0 if self.is_sharded_by_user else self.rank)
            for plan in self._worker_plans()
        )

    def count_done_batches(self, position: StreamPosition) -> int | None:
        """See `Feed`."""
        return None

    def is_finished(self, position: StreamPosition) -> bool:
        """See `Feed`: whether every worker has ended."""
        has_ended = [is_last for _, _, is_last in position.marks.values()]
        return len(has_ended) == max(1, self.workers) and all(has_ended)

    def describe(self) -> dict[str, Any]:
        """See `Feed`."""
        return {
            "kind": "stream",
            "workers": self.workers,
            "own": self.is_sharded_by_user,
            "dataset": type(self.user_dataset).__name__,
        }

    def save_position(self, position: StreamPosition | None) -> dict[str, Any]:
        """See `Feed`."""
        return (position or StreamPosition()).state_dict()

    def load_position(self, state: dict[str, Any], saved: dict[str, Any]) -> StreamPosition:
        """See `Feed`."""
        if max(1, saved["workers"]) != max(1, self.workers):
            raise ValueError(
                f"{self.label}: the checkpoint was made with num_workers={saved['workers']}, this"
                f" loader has {self.workers}. Each worker reads its own part of the stream, so the"
                " positions mean nothing to another number of workers.\nResume with"
                f" num_workers={saved['workers']}."
            )
        return StreamPosition.from_state(state)

    def position_after_rows(self, rows: int) -> None:
        """See `Feed`."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """See `Feed`."""

    def reseed(self, seed: int) -> None:
        """See `Feed`."""
        self.seed = seed

    def rewind(self) -> None:
        """See `Feed`. Without workers, the pass has moved the user's dataset: go back there."""
        self._rewind_state = self._begin_state

    def close(self) -> None:
        """See `Feed`."""
        close_loader(self.loader)


def _items_read(position: StreamPosition) -> int:
    return sum(mark["read"] for mark, _, _ in position.marks.values() if mark is not None)


class _ConvertBatch:
    """Applies the ``collate_fn`` of a loader with ``batch_size=None`` to the item inside."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def __call__(self, worker_batch: Any) -> Any:
        if isinstance(worker_batch, EndedTurn) or isinstance(worker_batch.batch, NoBatch):
            return worker_batch
        return WorkerBatch(
            worker_batch.worker,
            self.convert(worker_batch.batch),
            worker_batch.mark,
            worker_batch.rows_to_skip,
            worker_batch.is_last,
        )
