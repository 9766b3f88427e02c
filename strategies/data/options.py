"""The choices a user has about data, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .order import TAILS, Tail

Stage = Literal["fit", "validate", "test", "predict"]


@dataclass(frozen=True)
class DataOptions:
    """How the strategy shares loaders out among ranks.

    Attributes:
        sharding: "batch": every rank takes every ``world_size``-th batch, so that a micro-batch has
            ``world_size * batch_size`` samples over all ranks. "split": each batch is cut in
            ``world_size`` parts, so that a micro-batch has ``batch_size`` samples over all ranks.
            "dispatch": rank 0 reads for all ranks; the other ranks receive their batches and never
            open the data; sizes are those of "batch".
        even_batches: for training only. True: the last micro-batch wraps around to the epoch's
            first samples, so that all batches are full (with "dispatch": equally large). False: no
            sample is repeated, and the last batches are smaller.
        tail: overrides ``even_batches`` with one of the layouts of `order`. "uneven" is
            Accelerate's ``even_batches=False``, with which ranks may have different numbers of
            batches.
        exact_evaluation: True: validation, test and prediction see every sample exactly once.
            False: they end like training.
        streams: None: every rank reads the whole `IterableDataset` and keeps its part. Ranks whose
            first samples differ are an error, because a dataset that shards itself by rank would
            lose most of its samples. "own": the dataset shards itself by rank, as ``ddp`` needs it,
            and every item that it yields belongs to this rank. "cut": as None, but samples may
            differ by rank, as with augmentation from a generator that nobody seeds.
            Without a ``__len__`` it must yield equally many batches on all ranks. The next epoch
            does not continue an epoch that was cut short: it begins where that one began.
        seed: the seed of the order of samples. None: ``PL_GLOBAL_SEED`` if set, else rank 0's torch
            seed. A sampler with a generator of its own has rank 0's ``initial_seed()`` of it.
        per_sample_seed: seed python, numpy and torch for every sample from (seed, epoch, index),
            not only for every batch, which makes augmentation independent of the world size too.
            Measured: 12 to 22 us a sample.
        distinct_rank_rng: give ranks distinct dropout streams once the weights exist.
        prefetch_to_device: copy batches to the accelerator ahead of time, on a stream of their own.
        on_world_change: the rule for a resume on another world size. "allow": a changed global
            batch gets a warning. "keep_global_batch": gradient accumulation is adjusted, or the
            resume is refused with the numbers.
    """

    sharding: Literal["batch", "split", "dispatch"] = "batch"
    even_batches: bool = True
    tail: Tail | None = None
    exact_evaluation: bool = True
    streams: Literal["cut", "own"] | None = None
    seed: int | None = None
    per_sample_seed: bool = False
    distinct_rank_rng: bool = True
    prefetch_to_device: bool = True
    on_world_change: Literal["allow", "keep_global_batch"] = "allow"

    def __post_init__(self) -> None:
        self._check("sharding", ("batch", "split", "dispatch"))
        self._check("tail", (*TAILS, None))
        self._check("streams", ("cut", "own", None))
        self._check("on_world_change", ("allow", "keep_global_batch"))
        if self.sharding == "dispatch" and self.streams == "own":
            raise ValueError(
                'sharding="dispatch" reads on rank 0 only, streams="own" reads on every rank:'
                " choose one of them"
            )

    def _check(self, name: str, allowed: tuple[str | None, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    def tail_for(self, stage: Stage, world_size: int) -> Tail:
        """Choose the layout of the last row in this stage."""
        if world_size == 1:
            return "uneven"  # the one rank gets the batches that the user's own loader would give
        if stage != "fit" and self.exact_evaluation:
            return "balance"
        if self.tail is not None:
            return self.tail
        if not self.even_batches:
            return "balance"
        return "level" if self.sharding == "dispatch" else "wrap"

    def batch_per_rank(self, batch_size: int, world_size: int, label: str) -> int:
        """Count the samples that a rank gets of a full row; ``label`` names rank and loader."""
        if self.sharding != "split":
            return batch_size
        parts, rest = divmod(batch_size, world_size)
        if rest:
            raise ValueError(
                f'{label}: sharding="split" cuts each batch in {world_size} equal parts, but'
                f" batch_size is {batch_size}.\nUse {max(1, parts) * world_size} or"
                f' {(parts + 1) * world_size}, or sharding="batch".'
            )
        return parts
