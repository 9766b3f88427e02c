"""The batch sampler of a sharded map-style loader: it yields the indices that this rank loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .options import DataOptions, Stage
from .order import RowPlan, read_cell
from .seeding import Cell
from .source import MapSource


class ShardSampler:
    """Yields the cells of this rank, or with dispatch of all, of the rows of an epoch.

    `DataLoader` asks for indices ahead of time, so this class does not count the batches that were
    handed over. `ShardedLoader` counts them, and calls `begin_pass` to continue after them.
    """

    source: MapSource
    seed: int
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
        # the ranks whose cells are yielded, row by row
        self.ranks = range(world_size) if options.sharding == "dispatch" else [self.rank]
        self.tail = options.tail_for(stage, self.world_size)
        self.batch = self._batch_per_rank()
        self._cached_order: tuple[tuple[int, int, int], Sequence[Any]] | None = None
        self.draw_seed = 0
        self.begin_pass(0, 0, 0)

    def _batch_per_rank(self) -> int:
        source, world = self.source, self.world_size
        is_whole = source.has_batch_items or not source.is_collated
        if self.options.sharding == "split" and world > 1 and is_whole:
            raise ValueError(
                f'{source.label}: sharding="split" cuts batches of one known size, but'
                f" {type(source.sampler).__name__} yields whole batches of its own.\nGive the"
                ' batch sampler a `batch_size` that all its batches have, or use sharding="batch".'
            )
        return self.options.batch_per_rank(source.batch_size, world, source.label)

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
        if self.source.kind in ("sequential", "shuffled"):
            count = len(self.source.sampler)  # without drawing the order
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
        for row in range(plan.rows):
            for rank in self.ranks:
                if cell := read_cell(order, plan, row, rank):
                    items = list(cell[0]) if self.source.has_batch_items else cell
                    yield Cell(items, sample_key or (seed, plan.bounds(row, rank)[0]))

    def __len__(self) -> int:
        return sum(self.plan().batches(rank) for rank in self.ranks)

    def batches_per_rank(self) -> list[int]:
        """Count the batches of every rank in a whole epoch."""
        return self.plan(0).batches_per_rank()
