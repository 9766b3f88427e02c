"""Turns a user's loader into this rank's share; the strategy does this for every loader."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from .base_feed import Feed
from .loader import ShardedLoader
from .map_feed import MapFeed
from .options import DataOptions, Stage
from .stream_feed import StreamFeed


def shard_dataloader(
    loader: Any,
    *,
    rank: int,
    world_size: int,
    stage: Stage,
    options: DataOptions,
    device: torch.device | None = None,
) -> Any:
    """Make this rank's share of a loader.

    A collective: every rank calls this function for the same loaders in the same order. An object
    other than a `DataLoader` is returned as it is, because there is no rule to share it out. A
    `ShardedLoader` is made anew from its source.

    Args:
        loader: the user's `DataLoader`.
        rank: this process among the ranks that read different data.
        world_size: the number of ranks that read different data.
        stage: decides the layout of the last row, see `DataOptions`.
        options: the user's choices.
        device: the device to which batches are copied; None or CPU: they are not copied.

    Raises:
        ValueError: the data cannot be shared out, or, on every rank, the ranks do not agree about
            the data.
    """
    if isinstance(loader, ShardedLoader):
        loader.close()
        loader = loader.source
    if not isinstance(loader, DataLoader):
        return loader
    label = _describe_loader(loader, stage)
    make = StreamFeed if isinstance(loader.dataset, IterableDataset) else MapFeed
    seed = _choose_seed(options)
    feed = make(loader, options, stage, rank, world_size, seed, f"rank {rank}, {label}")
    feed.seed = _compare_facts(_collect_facts(feed, loader), feed)
    _check_lengths(feed, stage, label)
    device = device or torch.device("cpu")
    sharded = ShardedLoader(feed, loader, options, stage, device)
    if sharded.place_on_device and device.type == "cuda":
        feed.loader.pin_memory = True
    return sharded


def _describe_loader(loader: DataLoader, stage: Stage) -> str:
    size = f", {len(loader.dataset)} samples" if hasattr(loader.dataset, "__len__") else ""
    return f"{stage} dataloader ({type(loader.dataset).__name__}{size})"


def _choose_seed(options: DataOptions) -> int:
    if options.seed is not None:
        return options.seed
    if (seed := os.environ.get("PL_GLOBAL_SEED")) is not None:
        return int(seed)
    return torch.initial_seed() & 0x7FFFFFFF


def _collect_facts(feed: Feed, loader: DataLoader) -> dict[str, Any]:
    """Collect the facts that all ranks must have in common, by their names in errors."""
    facts = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if isinstance(feed, MapFeed):
        if feed.is_sharded_by_user:
            return {"kind": "sharded by the user"}
        if feed.source.kind in ("custom", "batches"):
            facts["checksum of the sampler's order"] = feed.source.fingerprint()
    return {**feed.describe(0), **facts}


def _compare_facts(facts: dict[str, Any], feed: Feed) -> int:
    """Compare all ranks' facts; returns rank 0's seed. A collective."""
    entries: list[Any] = [(facts, feed.seed)]
    if feed.world > 1 and dist.is_initialized():
        entries = [None] * feed.world
        dist.all_gather_object(entries, (facts, feed.seed))
    if any(other != facts for other, _ in entries):
        raise ValueError(
            f"{feed.label}: the ranks do not agree about the data: by rank"
            f" {[other for other, _ in entries]}.\nBuild dataset and sampler in the same way on"
            " every rank, or set Trainer(use_distributed_sampler=False) if each rank has data of"
            " its own."
        )
    return entries[0][1]


def _check_lengths(feed: Feed, stage: Stage, label: str) -> None:
    counts = feed.batches_per_rank(0)
    if stage == "fit" and counts is not None and len(set(counts)) > 1:
        raise ValueError(
            f"{label}: the ranks would have different numbers of training batches, {counts}."
            "\nChoose even_batches=True (repeats some samples), drop_last=True, or a batch size"
            " above 1, with which even_batches=False gives all ranks equally many; or fewer ranks."
        )
