"""The choices a user has about data, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .order import TAILS, Tail

Stage = Literal["fit", "validate", "test", "predict", "sanity"]
RNG_TYPES = ("torch", "cuda", "numpy", "python", "generator")


@dataclass(frozen=True)
class DataOptions:
    """How loaders are shared out among ranks.

    Attributes:
        sharding: "batch": every rank takes every ``world_size``-th batch, so a step sees
            ``world_size * batch_size`` samples. "split": each batch is cut in ``world_size`` parts,
            so a step sees ``batch_size`` samples. "dispatch": rank 0 reads for all, the others
            receive and never open the data; a step is as in "batch".
        even_batches: training only. True: the last step wraps around to the epoch's first samples,
            so that all batches are full ("dispatch": equally large). False: no sample is repeated;
            the last batches are smaller.
        tail: overrides ``even_batches`` with one of the layouts of `order`; "uneven" is
            Accelerate's ``even_batches=False``, with which ranks may have different numbers of
            batches.
        exact_evaluation: validation, test and prediction see every sample exactly once. False: they
            end like training.
        streams: "cut": every rank reads the whole `IterableDataset` and keeps its part. "own": the
            dataset shards itself by rank, all that it yields belongs to this rank; without a
            ``__len__`` it must yield equally many batches on all ranks. An epoch that was cut short
            is not continued by the next one: that begins where the one before began.
        seed: seed of the order of samples; None: ``PL_GLOBAL_SEED`` if set, else rank 0's torch
            seed.
        per_sample_seed: seed python, numpy and torch for every sample from (seed, epoch, index),
            which makes augmentation independent of world size, workers and restarts. Measured: 12
            to 22 us a sample.
        rng_types: what is set to rank 0's state. "generator": the generator of the user's own
            sampler, when a loader is set up; without it ranks that differ are an error. "torch",
            "cuda", "numpy", "python": the main generators, at the start of every training epoch,
            which makes all ranks draw the same dropout masks, see `rng.synchronize`.
        distinct_rank_rng: give ranks distinct dropout streams once the weights exist.
        prefetch_to_device: copy batches to the accelerator ahead of time, on a stream of their own.
        on_world_change: resuming on another world size: "allow" a changed global batch with a
            warning, or "keep_global_batch" by adjusting gradient accumulation, or refuse with the
            numbers.
    """

    sharding: Literal["batch", "split", "dispatch"] = "batch"
    even_batches: bool = True
    tail: Tail | None = None
    exact_evaluation: bool = True
    streams: Literal["cut", "own"] = "cut"
    seed: int | None = None
    per_sample_seed: bool = False
    rng_types: tuple[str, ...] = ("generator",)
    distinct_rank_rng: bool = True
    prefetch_to_device: bool = True
    on_world_change: Literal["allow", "keep_global_batch"] = "allow"

    def __post_init__(self) -> None:
        self._check("sharding", ("batch", "split", "dispatch"))
        self._check("tail", (*TAILS, None))
        self._check("streams", ("cut", "own"))
        self._check("on_world_change", ("allow", "keep_global_batch"))
        if unknown := [name for name in self.rng_types if name not in RNG_TYPES]:
            raise ValueError(f"rng_types must be among {RNG_TYPES}, got {unknown}")
        if self.sharding == "dispatch" and self.streams == "own":
            raise ValueError(
                'sharding="dispatch" reads on rank 0 only, streams="own" reads on every rank:'
                " choose one of them"
            )

    def _check(self, name: str, allowed: tuple[str | None, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    def tail_for(self, stage: Stage, world_size: int) -> Tail:
        """The layout of the last step in this stage."""
        if world_size == 1:
            return "uneven"  # one rank gets what the user's own loader would give
        if stage != "fit" and self.exact_evaluation:
            return "balance"
        if self.tail is not None:
            return self.tail
        if not self.even_batches:
            return "balance"
        return "level" if self.sharding == "dispatch" else "wrap"
