"""Turns a user's loader into this rank's share of it. Called by the strategy for every loader."""

from __future__ import annotations

import os
import warnings
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from .base_feed import Feed
from .dispatch import DispatchFeed
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
    """This rank's share of a loader. A collective: every rank calls it, in the same order.

    Anything but a `DataLoader` is returned as it is: nobody knows how to share it out.
    A `ShardedLoader` is made anew from its own source.

    Args:
        loader: the user's `DataLoader`.
        rank: of this process among those that read different data.
        world_size: number of those.
        stage: decides the layout of the last step, see `DataOptions`.
        options: the user's choices.
        device: where batches are copied to; None or CPU: they are left where they are.

    Raises:
        ValueError: the same on every rank, naming the ranks, if they do not agree about the data.
    """
    if isinstance(loader, ShardedLoader):
        loader.close()
        loader = loader.source
    if not isinstance(loader, DataLoader):
        return loader
    data = _name(loader, stage)
    label = f"rank {rank}, {data}"
    feed, seed = _agreed_feed(loader, options, stage, rank, world_size, data, label)
    _check_lengths(feed, stage, data, world_size)
    if isinstance(feed, StreamFeed) and options.streams == "cut" and world_size > 1 and rank == 0:
        _warn_of_whole_reads(data, world_size)
    device = device or torch.device("cpu")
    sharded = ShardedLoader(feed, loader, options, stage, rank, world_size, seed, device)
    if sharded.place_on_device and device.type == "cuda":
        feed.inner.pin_memory = True
    return sharded


def _agreed_feed(
    loader: DataLoader,
    options: DataOptions,
    stage: Stage,
    rank: int,
    world_size: int,
    data: str,
    label: str,
) -> tuple[Feed, int]:
    """The feed, and the seed of its order, which is rank 0's."""
    feed, facts, seed = _make_feed(loader, options, stage, rank, world_size, label)
    generator = feed.source.generator_state if isinstance(feed, MapFeed) else None
    seed, generator = _agree(facts, (seed, generator), data, rank, world_size)
    if feed is not None:
        feed.reseed(seed)
    if isinstance(feed, MapFeed) and "generator" in options.rng_types:
        feed.use_generator(generator)
    if options.sharding == "dispatch" and world_size > 1:
        feed = DispatchFeed(feed, loader, label, rank, world_size)
    assert feed is not None
    return feed, seed


def _warn_of_whole_reads(data: str, world_size: int) -> None:
    warnings.warn(
        f"{data}: every rank reads the whole stream and keeps one of {world_size} batches"
        ' (streams="cut"). If the dataset shards itself by rank already, choose'
        ' `Zero3Strategy(data=DataOptions(streams="own"))`, or samples are lost.',
        stacklevel=3,
    )


def _name(loader: DataLoader, stage: Stage) -> str:
    size = f", {len(loader.dataset)} samples" if hasattr(loader.dataset, "__len__") else ""  # type: ignore[arg-type]
    return f"{stage} dataloader ({type(loader.dataset).__name__}{size})"


def _make_feed(
    loader: DataLoader, options: DataOptions, stage: Stage, rank: int, world_size: int, label: str
) -> tuple[Feed | None, dict[str, Any], int]:
    """The feed, what all ranks must have in common, and the seed.

    A problem is returned as a fact, because raising here would leave the other ranks waiting.
    """
    seed = _choose_seed(options)
    streams = isinstance(loader.dataset, IterableDataset)
    if options.sharding == "dispatch" and rank > 0 and streams:
        return None, {"kind": "receiver"}, seed
    make = StreamFeed if streams else MapFeed
    try:
        feed = make(loader, options, stage, rank, world_size, seed, label)
        return feed, _facts(feed, loader, options), seed
    except (ValueError, IndexError) as error:
        return None, {"problem": str(error)}, seed


def _choose_seed(options: DataOptions) -> int:
    if options.seed is not None:
        return options.seed
    if (seed := os.environ.get("PL_GLOBAL_SEED")) is not None:
        return int(seed)
    return torch.initial_seed() & 0x7FFFFFFF


def _facts(feed: Feed, loader: DataLoader, options: DataOptions) -> dict[str, Any]:
    """What all ranks must have in common, by the name that an error gives it."""
    facts = {
        "kind": feed.describe()["kind"],
        "batch_size": loader.batch_size,
        "drop_last": loader.drop_last,
    }
    if isinstance(feed, MapFeed):
        source = feed.source
        if source.sharded_by_user:
            return {"kind": "sharded by the user"}
        facts["number of samples"] = source.size
        facts["sampler"] = type(source.sampler).__name__
        if source.kind in ("custom", "batches"):
            # Checked with one seed on all ranks: the sampler may draw from the global generators.
            facts["checksum of the sampler's order"] = source.fingerprint(0)
        if source.generator_state is not None and "generator" not in options.rng_types:
            facts["state of the sampler's generator"] = zlib.crc32(
                source.generator_state.numpy().tobytes()
            )
    return facts


def _agree(facts: dict[str, Any], shared: Any, data: str, rank: int, world_size: int) -> Any:
    """Compare all ranks' facts; returns what rank 0 has to share."""
    entries: list[Any] = [(facts, shared)]
    if world_size > 1 and dist.is_initialized():
        entries = [None] * world_size
        dist.all_gather_object(entries, (facts, shared))
    for other, (theirs, _) in enumerate(entries):
        if "problem" in theirs:
            raise ValueError(
                theirs["problem"] if other == rank else f"on rank {other}: {theirs['problem']}"
            )
    sizes = [theirs for theirs, _ in entries if theirs["kind"] != "receiver"]
    for name in sizes[0]:
        values = [theirs.get(name) for theirs in sizes]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"rank {rank}, {data}: the ranks do not agree about the {name}: by rank {values}."
                " Each would take its part of another sequence, so samples would be lost or"
                " repeated, and the run would hang where ranks have different numbers of batches."
                " HINT: build dataset and sampler in the same way on every rank, or set"
                " Trainer(use_distributed_sampler=False) if each rank has data of its own."
            )
    return entries[0][1]


def _check_lengths(feed: Feed, stage: Stage, data: str, world_size: int) -> None:
    counts = feed.batches_per_rank()
    if stage != "fit" or counts is None or max(counts) == 0:
        return
    if min(counts) == 0:
        raise ValueError(
            f"{data}: {world_size} ranks, but there are batches for only"
            f" {sum(count > 0 for count in counts)}; rank {counts.index(0)} would have none. HINT:"
            " use fewer ranks or a smaller batch size."
        )
    if len(set(counts)) > 1:
        raise ValueError(
            f"{data}: the ranks would have different numbers of training batches, {counts}, and"
            " those with more would wait for the others for ever. HINT: even_batches=True (repeats"
            " some samples), drop_last=True, or a batch size above 1, with which"
            " even_batches=False gives all ranks equally many."
        )
