"""Batches of a map-style dataset."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..support.random_states import derive_seed
from .base_feed import Pairs, close_loader, copy_loader
from .no_batch import NoBatch
from .options import DataOptions, Stage
from .order import batches_before
from .sampler import ShardSampler
from .seeding import SeededDataset
from .source import MapSource, read_source, unwrap_index_recorder


class MapFeed:
    """Batches of a map-style dataset; the position is the number of items of the order used up."""

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
        self.source: MapSource = read_source(loader, label)
        self.sampler = ShardSampler(self.source, options, stage, rank, world, seed)
        if options.sharding == "dispatch":
            self.sampler.ranks = list(range(world))
        self.row_samples = self.sampler.batch * self.sampler.world_size
        self.pads = stage != "fit" and not self.source.sized
        replaced: dict[str, Any] = {"generator": torch.Generator()}
        if self.source.collated:
            recorder = loader.batch_sampler
            replaced["batch_sampler"] = self.sampler
            if unwrap_index_recorder(recorder) is not recorder:
                replaced["batch_sampler"] = copy.copy(recorder)
                replaced["batch_sampler"]._batch_sampler = self.sampler
        else:
            replaced["sampler"] = self.sampler
        if options.per_sample_seed:
            replaced["dataset"] = SeededDataset(loader.dataset, seed)
        self.inner = copy_loader(loader, **replaced)

    def start(self, epoch: int, cycle: int, position: int | None, new_epoch: bool) -> Pairs:
        """See `Feed`. No sample before ``position`` is read."""
        start = 0 if new_epoch else position or 0
        self.sampler.begin(epoch, cycle, start)
        plan = self.sampler.plan()
        seed = derive_seed(self.sampler.seed, epoch, cycle, self.rank, start)
        self.inner.generator.manual_seed(seed)
        ranks = len(self.sampler.ranks)
        # The usual row by multiplication: this runs for every batch, and batches can be tiny.
        row_items = plan.row_items
        usual = (plan.items - start) // row_items - 1 if self.source.sized else 0
        number = 0
        for batch in iter(self.inner):
            row = number // ranks + 1
            number += 1
            yield (
                batch,
                start + row * row_items if row < usual else self.sampler.plan().handed_over(row),
            )
            del batch  # the caller may be done with it: its memory is for the next one
        if self.pads:
            counts = self.sampler.batches_per_rank()
            for _ in range(sum(max(counts) - counts[rank] for rank in self.sampler.ranks)):
                yield NoBatch(), plan.items

    def batches_per_rank(self) -> list[int] | None:
        """See `Feed`."""
        if self.source.sharded_by_user or not self.source.sized:
            return None
        return self.sampler.batches_per_rank()

    def length(self) -> int | None:
        """See `Feed`."""
        if not self.source.sized:
            return None
        return self.sampler.batches_per_rank()[self.sampler.rank]

    def done_before(self, position: int | None) -> int | None:
        """See `Feed`."""
        if not self.source.sized:
            return None
        return batches_before(self.sampler.plan(position or 0), self.sampler.rank)

    def finished(self, position: int) -> bool:
        """Whether no batch is left for any rank."""
        return self.sampler.plan(position).rows == 0

    def describe(self) -> dict[str, Any]:
        """See `Feed`."""
        return {
            "kind": "map",
            "order": self.source.kind,
            "unit": "batches" if self.source.opaque else "samples",
            "items": self.sampler.items if self.source.sized else None,
            "generator": self.source.generator_state,
            "sharded_by_user": self.source.sharded_by_user,
        }

    def save(self, position: int | None) -> int:
        """See `Feed`."""
        return position or 0

    def load(self, state: int, saved: dict[str, Any]) -> int:
        """See `Feed`."""
        mine = self.describe()
        for name, meaning in (
            ("unit", "counts"),
            ("order", "draws its order as"),
            ("items", "length"),
        ):
            if saved[name] != mine[name]:
                raise ValueError(
                    f"{self.label}: the checkpoint's loader differs from this one: {meaning}"
                    f" {saved[name]!r} then, {mine[name]!r} now. Position {state} would mean other"
                    " samples. HINT: resume with the same dataset and sampler, or start a new run"
                    " from the weights only."
                )
        self.use_generator(saved["generator"])
        return state

    def use_generator(self, state: torch.Tensor | None) -> None:
        """Draw orders from the user's own generator as it was in ``state``; None changes
        nothing.
        """
        if state is not None:
            self.source.generator_state = state
            self.sampler.forget_order()

    def after_rows(self, rows: int) -> int | None:
        """See `Feed`."""
        return self.sampler.plan(0).handed_over(rows)

    def set_epoch(self, epoch: int) -> None:
        """See `Feed`."""
        self.sampler.begin(epoch, 0, 0)

    def reseed(self, seed: int) -> None:
        """See `Feed`."""
        self.sampler.seed = seed
        if isinstance(self.inner.dataset, SeededDataset):
            self.close()
            self.inner.dataset.seed = seed

    def rewind(self) -> None:
        """See `Feed`. Nothing to do: a pass is a function of its position."""

    def close(self) -> None:
        """See `Feed`."""
        close_loader(self.inner)
