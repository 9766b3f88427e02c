"""Batches of a map-style dataset."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..support.random_states import derive_seed
from .base_feed import Feed, Pairs, Place, copy_loader
from .options import DataOptions, Stage
from .sampler import ShardSampler
from .seeding import SeededDataset, return_unchanged
from .source import read_source, unwrap_index_recorder


class MapFeed(Feed):
    """Batches of a map-style dataset; a position counts the items of the order that are used."""

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
        self.label = label
        self.rank = rank
        self.world = world
        self.source = read_source(loader, label)
        self.is_sharded_by_user = self.source.is_sharded_by_user
        self.sampler = ShardSampler(self.source, options, stage, rank, world, seed)
        self.row_samples = self.sampler.batch * self.sampler.world_size
        replaced: dict[str, Any] = {"sampler": self.sampler}
        if self.source.is_collated:
            recorder = loader.batch_sampler
            replaced = {"batch_sampler": self.sampler}
            if unwrap_index_recorder(recorder) is not recorder:
                replaced["batch_sampler"] = copy.copy(recorder)
                replaced["batch_sampler"]._batch_sampler = self.sampler
                # a rank without a batch never iterates it, and its constructor sets none
                replaced["batch_sampler"].seen_batch_indices = []
        self.loader = copy_loader(
            loader,
            dataset=SeededDataset(
                loader.dataset, loader.collate_fn, self.source.is_collated, options.per_sample_seed
            ),
            collate_fn=return_unchanged,
            generator=torch.Generator(),
            **replaced,
        )

    def start(self, place: Place, salt: int = 0) -> Pairs:
        """See `Feed`. The loader reads no sample before the first batch."""
        sampler, epoch, cycle = self.sampler, place.epoch, place.cycle
        sampler.begin_pass(epoch, cycle, 0 if place.is_new_epoch else place.position or 0)
        owner = self.rank if self.is_sharded_by_user else 0
        sampler.draw_seed = derive_seed(sampler.seed, epoch, cycle, salt, owner)
        plan = sampler.plan()
        # Of this generator, `DataLoader` draws the seeds that workers begin with.
        self.loader.generator.manual_seed(derive_seed(sampler.draw_seed, self.rank, plan.start))
        number = ranks = len(sampler.ranks)
        for batch in iter(self.loader):  # not `enumerate`, which would keep each batch
            yield batch, plan.items_after(number // ranks)
            number += 1
            del batch  # the caller may have dropped the batch: free its memory for the next one

    def batches_per_rank(self) -> list[int]:
        """See `Feed`."""
        counts = self.sampler.batches_per_rank()
        return counts * (self.world // len(counts))

    def count_done_batches(self, position: int | None) -> int:
        """See `Feed`. These and the batches to come are as many as a whole epoch's on any world."""
        rank, plan = self.sampler.rank, self.sampler.plan
        return plan(0).batches(rank) - plan(position or 0).batches(rank)

    def describe(self) -> dict[str, Any]:
        """See `Feed`."""
        return {
            "kind": self.kind,
            "order": self.source.kind,
            "unit": "batches" if self.source.has_batch_items else "samples",
            "items": self.sampler.items,
        }

    def require_same(self, saved: dict[str, Any]) -> None:
        """See `Feed`."""
        own_facts = self.describe()
        for name, meaning in (
            ("unit", "counts"),
            ("order", "draws its order as"),
            ("items", "length"),
        ):
            if saved[name] != own_facts[name]:
                raise ValueError(
                    f"{self.label}: the checkpoint's loader differs from this one: {meaning}"
                    f" {saved[name]!r} then, {own_facts[name]!r} now. Its position would mean"
                    " other samples.\nResume with the same dataset and sampler, or start a new"
                    " run from the weights only."
                )

    def set_epoch(self, epoch: int) -> None:
        """See `Feed`."""
        self.sampler.begin_pass(epoch, 0, 0)

    def reseed(self, seed: int) -> None:
        """See `Feed`."""
        self.sampler.seed = seed
