"""Batches of an `IterableDataset`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..support.random_states import derive_seed
from .base_feed import Feed, Pairs, Place, copy_loader
from .options import DataOptions, Stage
from .order import RowPlan
from .seeding import return_unchanged
from .stream import BEGINNING, StreamPosition, StreamShard, advance


class StreamFeed(Feed):
    """Batches of an `IterableDataset`; the position is a `StreamPosition`."""

    kind = "stream"

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
        self.world = world
        self.seed = seed
        self.is_sharded_by_user = is_own = options.streams == "own"
        parts = 1 if is_own else world
        self.shape = RowPlan(
            0,
            options.batch_per_rank(loader.batch_size or 1, parts, label),
            parts,
            options.tail_for(stage, parts),
            loader.drop_last,
        )
        self.row_samples = self.shape.batch * world
        self.user_dataset: Any = loader.dataset
        self.is_sized = hasattr(loader.dataset, "__len__")
        self.shard = StreamShard(
            loader.dataset,
            self.shape,
            range(world) if options.sharding == "dispatch" else [0 if is_own else rank],
            loader.collate_fn,
            is_batched=loader.batch_size is not None,
            per_sample=options.per_sample_seed,
            label=label,
            needs_padding=stage != "fit" and not is_own and not self.is_sized,
        )
        self.loader = copy_loader(
            loader,
            dataset=self.shard,
            batch_size=None,
            batch_sampler=None,
            drop_last=False,
            collate_fn=return_unchanged,
            generator=torch.Generator(),
        )
        self.workers = loader.num_workers
        self._rewind_state: Any = None  # the state from which the next pass begins again

    def start(self, place: Place, salt: int = 0) -> Pairs:
        """See `Feed`."""
        position, is_new_epoch = place.position or BEGINNING, place.is_new_epoch
        if self._rewind_state is not None and not position["marks"]:
            mark = {"read": 0, "state": self._rewind_state, "begin": self._rewind_state}
            position, is_new_epoch = {"marks": {0: (mark, 0, False)}, "turn": 0}, True
        is_dataset_kept = self.workers == 0 or self.loader.persistent_workers
        if is_new_epoch and not is_dataset_kept:
            # Fresh workers copy the main process's dataset, which the last epoch did not move.
            position = BEGINNING
        self._rewind_state = None
        if position["marks"]:
            self.close()  # persistent workers do not see a new position
        owner = self.rank if self.is_sharded_by_user else 0
        seed = derive_seed(self.seed, place.epoch, place.cycle, salt, owner)
        self.shard.begin_pass(place.epoch, position, is_new_epoch, seed)
        # Of this generator, `DataLoader` draws the seeds that workers begin with.
        self.loader.generator.manual_seed(derive_seed(seed, self.rank))
        reached = BEGINNING if is_new_epoch else position
        self.first_sample = None
        for row in iter(self.loader):
            if row is None:
                continue
            reached = advance(reached, row, self.workers)
            batches = row.batches
            if self.first_sample is None:
                self.first_sample = row.first_sample
            del row
            while batches:
                yield batches.pop(0), reached

    def batches_per_rank(self) -> list[int] | None:
        """See `Feed`. The counts suppose that each of n workers reads every n-th item, as usual."""
        if not self.is_sized:
            return None
        size, workers = len(self.user_dataset), max(1, self.workers)
        plans = [
            replace(self.shape, items=math.ceil(max(0, size - worker) / workers))
            for worker in range(workers)
        ]
        counts = [sum(plan.batches(rank) for plan in plans) for rank in range(self.shape.world)]
        return counts * (self.world // len(counts))

    def is_finished(self, position: StreamPosition) -> bool:
        """See `Feed`: whether every worker has ended."""
        has_ended = [is_last for _, _, is_last in position["marks"].values()]
        return len(has_ended) == max(1, self.workers) and all(has_ended)

    def describe(self) -> dict[str, Any]:
        """See `Feed`."""
        return {"kind": self.kind, "workers": self.workers}

    def require_same(self, saved: dict[str, Any]) -> None:
        """See `Feed`."""
        if max(1, saved["workers"]) != max(1, self.workers):
            raise ValueError(
                f"{self.label}: the checkpoint was made with num_workers={saved['workers']}, this"
                f" loader has {self.workers}. Each worker reads its own part of the stream, so the"
                " positions mean nothing to another number of workers.\nResume with"
                f" num_workers={saved['workers']}."
            )

    def reseed(self, seed: int) -> None:
        """See `Feed`."""
        self.seed = seed

    def rewind(self) -> None:
        """See `Feed`. Without workers, the pass has moved the user's dataset: go back there."""
        self._rewind_state = self.shard.begin_state
