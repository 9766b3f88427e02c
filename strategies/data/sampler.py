"""The batch sampler of a sharded map-style loader: it yields the indices that this rank loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .options import DataOptions, Stage
from .order import RowPlan, read_cell
from .seeding import Cell
from .source import MapSource
from .unsized_order import UnsizedOrder


class ShardSampler:
    """Yields the cells of some ranks, usually one, of the rows of an epoch from ``start`` on.

    `DataLoader` asks for indices ahead of time, so this class does not count the batches that were
    handed over. `ShardedLoader` counts them, and calls `begin_pass` to continue after them.
    """

    source: MapSource
    ranks: Sequence[int]  # the ranks whose cells are yielded, in row-major order
    seed: int
    epoch: int
    cycle: int
    start: int  # items of the order that were handed over before
    draw_seed: int  # of the random numbers that datasets draw in this pass

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
        self.rank, self.world_size = (0, 1) if source.is_sharded_by_user else (rank, world_size)
        self.ranks = [self.rank]
        self.tail = options.tail_for(stage, self.world_size)
        self.batch = self._batch_per_rank()
        self.epoch = self.cycle = self.start = self.draw_seed = 0
        self._cached_order: tuple[tuple[int, int, int], Sequence[Any]] | None = None

    def _batch_per_rank(self) -> int:
        source, world = self.source, self.world_size
        size = source.batch_size
        if self.options.sharding != "split" or world == 1:
            return size
        if source.has_batch_items or not source.is_collated:
            raise ValueError(
                f'{source.label}: sharding="split" cuts batches of one known size, but'
                f" {type(source.sampler).__name__} yields whole batches of its own.\nGive the"
                ' batch sampler a `batch_size` that all its batches have, or use sharding="batch".'
            )
        if size % world:
            raise ValueError(
                f'{source.label}: sharding="split" cuts each batch in {world} equal parts, but'
                f" batch_size is {size}.\nUse {max(1, size // world) * world} or"
                f' {-(-size // world) * world}, or sharding="batch".'
            )
        return size // world

    def forget_order(self) -> None:
        """Drop the cached order, because the source draws another one now."""
        self._cached_order = None

    def begin_pass(self, epoch: int, cycle: int, start: int) -> None:
        """Make the next iteration yield the rest of this pass, after ``start`` items."""
        self.epoch, self.cycle, self.start = epoch, cycle, start

    @property
    def order(self) -> Sequence[Any]:
        """The items of the current pass."""
        key = (self.seed, self.epoch, self.cycle)
        if self._cached_order is None or self._cached_order[0] != key:
            self._cached_order = (key, self.source.order(*key))
        return self._cached_order[1]

    @property
    def items(self) -> int:
        """The number of items that are used; exact layouts drop as many as one process would."""
        if self.source.kind == "sequential":
            count = len(self.source.sampler)
        elif self.source.kind == "shuffled":
            count = self.source.sampler.num_samples
        else:
            count = len(self.order)
        return count - count % self.source.batch_size if self._drops_like_one_process() else count

    def _drops_like_one_process(self) -> bool:
        return self.source.drop_last and self.tail == "balance"

    def plan(self, start: int | None = None) -> RowPlan:
        """Plan the rows of the current pass, after ``start`` items (None: those of the pass)."""
        items = self.items
        start = min(self.start if start is None else start, items)
        drops_last = self.source.drop_last and not self._drops_like_one_process()
        return RowPlan(items, self.batch, self.world_size, self.tail, drops_last, start)

    def __iter__(self) -> Iterator[Any]:
        plan, order, seed = self.plan(), self.order, self.draw_seed
        sample_key = (self.seed, self.epoch) if self.options.per_sample_seed else None
        sliced_rows = 0
        if len(self.ranks) == 1 and isinstance(order, np.ndarray):
            # Full rows by slices of an array, because this runs for every batch, and batches can be
            # tiny. The last full row is left out, because it may belong to the tail.
            sliced_rows = max(0, (plan.items - plan.start) // plan.row_items - 1)
            first = plan.start + self.ranks[0] * plan.batch
            for lo in range(first, first + sliced_rows * plan.row_items, plan.row_items):
                yield Cell(order[lo : lo + plan.batch].tolist(), sample_key or (seed, lo))
        for plan, row in self._plan_rows(sliced_rows):
            for rank in self.ranks:
                cell = read_cell(order, plan, row, rank)
                if not cell:
                    continue
                if self.source.has_batch_items:
                    cell = list(cell[0])
                yield Cell(cell, sample_key or (seed, plan.bounds(row, rank)[0]))

    def _plan_rows(self, first: int) -> Iterator[tuple[RowPlan, int]]:
        """Yield the rows from ``first`` on, each as (plan for this row, row)."""
        plan, order, row = self.plan(), self.order, first
        while row < plan.rows:
            if isinstance(order, UnsizedOrder):
                # The layout of this row depends on whether a full row follows.
                order.forget_before(plan.start + row * plan.row_items)
                order.draw_until(plan.start + (row + 2) * plan.row_items)
                plan = self.plan()
                if row >= plan.rows:
                    return
            yield plan, row
            row += 1

    def __len__(self) -> int:
        return sum(self.plan().batches(rank) for rank in self.ranks)

    def batches_per_rank(self) -> list[int]:
        """Count the batches of every rank in a whole epoch.

        The counts of an order without a length are right only once its end was seen.
        """
        return self.plan(0).batches_per_rank()

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: other code may call this on samplers; `begin_pass` sets the epoch."""
