"""Batches of a map-style dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import DataLoader

from .base_feed import Feed, Pairs, Place, copy_loader
from .options import DataOptions, Stage
from .order import RowPlan, read_cell
from .seeding import Cell, SeededDataset
from .source import MapSource


class MapFeed(Feed):
    """Batches of a map-style dataset; a position counts the items of the order that are used.

    The feed is the batch sampler of the loader that reads, and yields the cells of the pass that
    was started last. That loader asks for them ahead of time, so positions come with its batches.
    """

    kind = "map"

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
        self.source = source = MapSource(loader)
        if source.seed is not None:
            seed = source.seed & 0x7FFFFFFF
        super().__init__(
            options,
            stage,
            rank,
            world,
            seed,
            label,
            source.is_sharded_by_user,
            source.batch_size,
            source.drop_last,
        )
        self.is_seeded_by_sample = options.per_sample_seed
        # of one pass, as every batch asks for it
        self._draw_order = lru_cache(maxsize=1)(source.order)
        self._cells: Iterator[Cell] = iter(())
        sampler: Any = self
        if isinstance(loader.batch_sampler, _IndexBatchSamplerWrapper):
            sampler = _IndexBatchSamplerWrapper(sampler)
            # a rank without a batch never iterates it, and its constructor sets none
            sampler.seen_batch_indices = []
        dataset = SeededDataset(
            loader.dataset,
            loader.collate_fn,
            loader.batch_sampler is not None,
            options.per_sample_seed,
        )
        self.loader = copy_loader(loader, dataset=dataset, batch_sampler=sampler)

    def __iter__(self) -> Iterator[Cell]:
        return self._cells

    def start(self, place: Place, salt: int = 0) -> Pairs:
        """See `Feed`. The loader reads no sample before the first batch."""
        plan = self._plan(place.epoch, place.cycle, place.position or 0)
        order = self._draw_order(self.seed, place.epoch, place.cycle)
        seed = self.seed_pass(place, salt)
        sample_key = (self.seed, place.epoch) if self.is_seeded_by_sample else None
        self._cells = self._cut(order, plan, seed, sample_key)
        number = ranks = len(self.ranks)
        for batch in iter(self.loader):  # not `enumerate`, which would keep each batch
            yield batch, plan.items_after(number // ranks)
            number += 1
            del batch  # the caller may have dropped the batch: free its memory for the next one

    def _cut(
        self, order: Sequence[Any], plan: RowPlan, seed: int, sample_key: tuple[int, int] | None
    ) -> Iterator[Cell]:
        for row in range(plan.rows):
            for rank in self.ranks:
                if items := read_cell(order, plan, row, rank):
                    key = sample_key or (seed, plan.bounds(row, rank)[0])
                    yield Cell(items[0] if self.source.kind == "batches" else items, key)

    def _count_items(self, epoch: int, cycle: int = 0) -> int:
        """Count the items that are used."""
        source, shape = self.source, self.shape
        if source.kind in ("sequential", "shuffled"):
            count = len(source.sampler)  # without drawing the order
        else:
            count = len(self._draw_order(self.seed, epoch, cycle))
        # A balanced end drops as many as one process would.
        is_cut = shape.drop_last and not shape.wraps
        return count - count % source.batch_size if is_cut else count

    def _plan(self, epoch: int, cycle: int = 0, start: int = 0) -> RowPlan:
        items, shape = self._count_items(epoch, cycle), self.shape
        drop_last = shape.drop_last and shape.wraps
        return replace(shape, items=items, drop_last=drop_last, start=min(start, items))

    def batches_per_rank(self, epoch: int) -> list[int]:
        """See `Feed`."""
        return self._plan(epoch).batches_per_rank() * (self.world // self.shape.world)

    def count_done_batches(self, epoch: int, position: int | None) -> int:
        """See `Feed`. These and the batches to come are as many as a whole epoch's on any world."""
        rest = self._plan(epoch, start=position or 0)
        return self._plan(epoch).batches(self.cell) - rest.batches(self.cell)

    def describe(self, epoch: int) -> dict[str, Any]:
        """See `Feed`."""
        return {"kind": self.kind, "order": self.source.kind, "length": self._count_items(epoch)}
