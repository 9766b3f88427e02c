"""Which indices this rank loads next: the batch sampler of a sharded map-style loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .options import DataOptions, Stage
from .order import RowPlan, take
from .seeding import SampleKey
from .source import MapSource
from .unsized_order import UnsizedOrder


class ShardSampler:
    """Yields the cells of some ranks, usually one, of the rows of an epoch from ``start`` on.

    `DataLoader` asks for indices ahead of time, so nothing here counts what was handed over; the
    loader does, and comes back with `begin` to continue from there.
    """

    source: MapSource
    ranks: Sequence[int]  # whose cells are yielded, in row-major order
    seed: int
    epoch: int
    cycle: int
    start: int  # items of the order that were handed over before

    def __init__(
        self,
        source: MapSource,
        options: DataOptions,
        stage: Stage,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        self.source = source
        self.options = options
        self.seed = seed
        self.rank, self.world_size = (0, 1) if source.sharded_by_user else (rank, world_size)
        self.ranks = [self.rank]
        self.tail = options.tail_for(stage, self.world_size)
        self.batch = self._batch_per_rank()
        self.epoch = self.cycle = self.start = 0
        self._cached: tuple[tuple[int, int, int], Sequence[Any]] | None = None

    def _batch_per_rank(self) -> int:
        source, world = self.source, self.world_size
        if self.options.sharding != "split" or world == 1:
            return source.batch
        if source.opaque or not source.collated:
            raise ValueError(
                f'{source.label}: sharding="split" cuts batches of one known size, but'
                f" {type(source.sampler).__name__} yields whole batches of its own. HINT: give the"
                ' batch sampler a `batch_size` that all its batches have, or use sharding="batch".'
            )
        if source.batch % world:
            raise ValueError(
                f'{source.label}: sharding="split" cuts each batch in {world} equal parts, but'
                f" batch_size is {source.batch}. HINT: use {max(1, source.batch // world) * world}"
                f' or {-(-source.batch // world) * world}, or sharding="batch".'
            )
        return source.batch // world

    def forget_order(self) -> None:
        """The source draws another one now."""
        self._cached = None

    def begin(self, epoch: int, cycle: int, start: int) -> None:
        """The next iteration yields the rest of this pass after ``start`` items."""
        self.epoch, self.cycle, self.start = epoch, cycle, start

    @property
    def order(self) -> Sequence[Any]:
        """The items of the current pass."""
        key = (self.seed, self.epoch, self.cycle)
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, self.source.order(*key))
        return self._cached[1]

    @property
    def items(self) -> int:
        """Items of the order that are used: exact layouts drop what one process would drop."""
        if self.source.kind == "sequential":
            count = len(self.source.sampler)
        elif self.source.kind == "shuffled":
            count = self.source.sampler.num_samples
        else:
            count = len(self.order)
        return count - count % self.source.batch if self._drops_like_one_process() else count

    def _drops_like_one_process(self) -> bool:
        return self.source.drop_last and self.tail == "balance"

    def plan(self, start: int | None = None) -> RowPlan:
        """The rows of the current pass, from its own start or from another one."""
        items = self.items
        start = min(self.start if start is None else start, items)
        drop = self.source.drop_last and not self._drops_like_one_process()
        return RowPlan(items, self.batch, self.world_size, self.tail, drop, start)

    def __iter__(self) -> Iterator[Any]:
        plan, order, epoch = self.plan(), self.order, self.epoch
        usual = 0
        if (
            len(self.ranks) == 1
            and isinstance(order, np.ndarray)
            and not self.options.per_sample_seed
        ):
            # The usual rows by slices of an array: this runs for every batch, and batches can be
            # tiny.
            usual = max(0, (plan.items - plan.start) // plan.row_items - 1)
            first = plan.start + self.ranks[0] * plan.batch
            for lo in range(first, first + usual * plan.row_items, plan.row_items):
                cell = order[lo : lo + plan.batch].tolist()
                yield cell if self.source.collated else cell[0]
        for plan, row in self._rows(usual):
            for rank in self.ranks:
                cell = take(order, plan, row, rank)
                if not cell:
                    continue
                if self.source.opaque:
                    cell = list(cell[0])
                if self.options.per_sample_seed:
                    cell = [SampleKey(epoch, index) for index in cell]
                yield cell if self.source.collated else cell[0]

    def _rows(self, first: int) -> Iterator[tuple[RowPlan, int]]:
        """Rows from ``first`` on, with the plan that holds for them."""
        plan, order, row = self.plan(), self.order, first
        while row < plan.rows:
            if isinstance(order, UnsizedOrder):
                # How this row is cut depends on whether a whole one follows.
                order.forget(plan.start + row * plan.row_items)
                order.reach(plan.start + (row + 2) * plan.row_items)
                plan = self.plan()
                if row >= plan.rows:
                    return
            yield plan, row
            row += 1

    def __len__(self) -> int:
        return sum(self.plan().batches(rank) for rank in self.ranks)

    def batches_per_rank(self) -> list[int]:
        """Batches of every rank in a whole epoch; of an order without a length, once its end was
        seen.
        """
        return self.plan(0).batches_per_rank()

    def set_epoch(self, epoch: int) -> None:
        """Accepted for code that calls it on samplers; the loader tells the epoch through
        `begin`.
        """
