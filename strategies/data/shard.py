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
        ValueError: on every rank, if the data cannot be shared out, or if the ranks do not agree
            about the data; the message names the ranks.
    """
    if isinstance(loader, ShardedLoader):
        loader.close()
        loader = loader.source
    if not isinstance(loader, DataLoader):
        return loader
    loader_name = _describe_loader(loader, stage)
    label = f"rank {rank}, {loader_name}"
    seed = _choose_seed(options)
    feed, facts = _make_feed(loader, options, stage, rank, world_size, seed, label)
    if isinstance(feed, MapFeed) and feed.source.seed is not None:
        seed = feed.source.seed & 0x7FFFFFFF
    seed = _compare_facts(facts, seed, loader_name, rank, world_size)
    assert feed is not None
    feed.reseed(seed)
    _check_lengths(feed, stage, loader_name, world_size)
    device = device or torch.device("cpu")
    sharded = ShardedLoader(feed, loader, options, stage, rank, world_size, seed, device)
    if sharded.place_on_device and device.type == "cuda":
        feed.loader.pin_memory = True
    return sharded


def _describe_loader(loader: DataLoader, stage: Stage) -> str:
    size = f", {len(loader.dataset)} samples" if hasattr(loader.dataset, "__len__") else ""
    return f"{stage} dataloader ({type(loader.dataset).__name__}{size})"


def _make_feed(
    loader: DataLoader,
    options: DataOptions,
    stage: Stage,
    rank: int,
    world_size: int,
    seed: int,
    label: str,
) -> tuple[Feed | None, dict[str, Any]]:
    """Make (the feed, the facts that all ranks must have in common).

    With ``sharding="dispatch"`` other ranks than 0 have a feed only to count by; nobody reads it.

    hazard: an error raised here would leave the other ranks waiting in the exchange of the facts.
    So the facts carry it there.
    """
    make = StreamFeed if isinstance(loader.dataset, IterableDataset) else MapFeed
    try:
        feed = make(loader, options, stage, rank, world_size, seed, label)
        return feed, _collect_facts(feed, loader)
    except ValueError as error:
        return None, {"problem": str(error)}


def _choose_seed(options: DataOptions) -> int:
    if options.seed is not None:
        return options.seed
    if (seed := os.environ.get("PL_GLOBAL_SEED")) is not None:
        return int(seed)
    return torch.initial_seed() & 0x7FFFFFFF


def _collect_facts(feed: Feed, loader: DataLoader) -> dict[str, Any]:
    """Collect the facts that all ranks must have in common, by their names in errors."""
    facts = {
        "kind": feed.kind,
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
    }
    if isinstance(feed, MapFeed):
        source = feed.source
        if source.is_sharded_by_user:
            return {"kind": "sharded by the user"}
        facts["number of samples"] = getattr(loader.dataset, "__len__", lambda: None)()
        facts["sampler"] = type(source.sampler).__name__
        if source.kind in ("custom", "batches"):
            # One seed on all ranks, because the sampler may draw from the global generators.
            facts["checksum of the sampler's order"] = source.fingerprint(0)
    return facts


def _compare_facts(
    facts: dict[str, Any], seed: int, loader_name: str, rank: int, world_size: int
) -> int:
    """Compare all ranks' facts; returns rank 0's seed. A collective."""
    entries: list[Any] = [(facts, seed)]
    if world_size > 1 and dist.is_initialized():
        entries = [None] * world_size
        dist.all_gather_object(entries, (facts, seed))
    for other, (other_facts, _) in enumerate(entries):
        if "problem" in other_facts:
            where = "" if other == rank else f"on rank {other}: "
            raise ValueError(where + other_facts["problem"])
    for name in entries[0][0]:
        values = [other_facts.get(name) for other_facts, _ in entries]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"rank {rank}, {loader_name}: the ranks do not agree about the {name}: by rank"
                f" {values}.\nBuild dataset and sampler in the same way on every rank, or set"
                " Trainer(use_distributed_sampler=False) if each rank has data of its own."
            )
    return entries[0][1]


def _check_lengths(feed: Feed, stage: Stage, loader_name: str, world_size: int) -> None:
    counts = feed.batches_per_rank()
    if stage != "fit" or counts is None or max(counts) == 0:
        return
    if len(set(counts)) > 1:
        raise ValueError(
            f"{loader_name}: the ranks would have different numbers of training batches, {counts}."
            "\nChoose even_batches=True (repeats some samples), drop_last=True, or a batch size"
            " above 1, with which even_batches=False gives all ranks equally many; or fewer ranks."
        )
