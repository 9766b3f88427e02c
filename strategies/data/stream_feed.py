"""Batches of an `IterableDataset`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from .base_feed import Feed, Pairs, Place, copy_loader
from .options import DataOptions, Stage
from .stream import BEGINNING, StreamPosition, StreamShard, advance, load_state, state_of


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
        is_own = options.streams == "own"
        super().__init__(
            options,
            stage,
            rank,
            world,
            seed,
            label,
            is_own,
            loader.batch_size or 1,
            loader.drop_last,
        )
        self.user_dataset: Any = loader.dataset
        self.is_sized = hasattr(loader.dataset, "__len__")
        self.shard = StreamShard(
            loader.dataset,
            self.shape,
            self.ranks,
            loader.collate_fn,
            is_batched=loader.batch_size is not None,
            per_sample=options.per_sample_seed,
            label=label,
            needs_padding=stage != "fit" and not is_own and not self.is_sized,
        )
        self.loader = copy_loader(
            loader, dataset=self.shard, batch_size=None, batch_sampler=None, drop_last=False
        )
        self.workers = loader.num_workers
        self._first_state = state_of(loader.dataset)

    def start(self, place: Place, salt: int = 0) -> Pairs:
        """See `Feed`."""
        position = place.position or BEGINNING
        if position != BEGINNING:
            self.close()  # persistent workers do not see a new position
        self.shard.begin_pass(place.epoch, position, self.seed_pass(place, salt))
        self.first_sample = None
        for row in iter(self.loader):
            if row is None:
                continue
            position = advance(position, row, self.workers)
            batches = row.batches
            if self.first_sample is None:
                self.first_sample = row.first_sample
            del row
            while batches:
                yield batches.pop(0), position

    def batches_per_rank(self, epoch: int) -> list[int] | None:
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
        marks, _ = position
        has_ended = [is_last for _, _, is_last in marks.values()]
        return len(has_ended) == max(1, self.workers) and all(has_ended)

    def describe(self, epoch: int) -> dict[str, Any]:
        """See `Feed`. Each worker reads its own part of the stream."""
        return {"kind": self.kind, "num_workers": max(1, self.workers)}

    def rewind(self) -> None:
        """See `Feed`. Without workers, the pass has moved the user's dataset: go back."""
        if self.workers == 0:
            load_state(self.user_dataset, self._first_state)
