"""The data of a user's `DataLoader` and its order, a function of (seed, epoch, pass)."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ..support.random_states import derive_seed, scoped


class MapSource:
    """The order in which a map-style loader reads.

    Attributes:
        kind: "sequential"; "shuffled" (a permutation by `RandomSampler`); "custom": any other
            sampler; "batches": a custom batch sampler, whose items are whole batches.
        sampler: the user's sampler or batch sampler.
        batch_size: items in one of the user's batches.
        drop_last: the user's choice.
        is_sharded_by_user: the sampler is a `DistributedSampler`, whose items are for this rank.
        seed: the first seed of the sampler's own generator, which becomes that of the loader.

    Raises:
        TypeError: the sampler has no length, without which nothing tells where an epoch ends.
    """

    kind: Literal["sequential", "shuffled", "custom", "batches"]

    def __init__(self, loader: DataLoader) -> None:
        batches: Any = loader.batch_sampler
        if isinstance(batches, _IndexBatchSamplerWrapper):  # for prediction
            batches = batches._batch_sampler
        self.kind = "custom"
        self.batch_size, self.drop_last = 1, getattr(batches, "drop_last", False)
        if batches is None:
            self.sampler: Any = loader.sampler
        elif _is_plain(batches):
            self.sampler, self.batch_size = batches.sampler, batches.batch_size
        else:
            self.sampler, self.kind = batches, "batches"
        sampler = self.sampler
        length = len(sampler)
        if type(sampler) is SequentialSampler:
            self.kind = "sequential"
        elif type(sampler) is RandomSampler and not sampler.replacement:
            self.kind = "shuffled" if length == len(sampler.data_source) else "custom"
        samplers = sampler, getattr(sampler, "sampler", None)
        self.is_sharded_by_user = any(isinstance(one, DistributedSampler) for one in samplers)
        generator = None if is_torchdata(sampler) else getattr(sampler, "generator", None)
        self.seed = generator.initial_seed() if isinstance(generator, torch.Generator) else None

    def order(self, seed: int, epoch: int, cycle: int) -> Sequence[Any]:
        """Draw the items of one pass over the data; ``cycle`` counts passes within the epoch."""
        if self.kind == "sequential":
            return range(len(self.sampler))
        pass_seed = seed + epoch if cycle == 0 else derive_seed(seed, epoch, cycle)
        generator = torch.Generator().manual_seed(pass_seed)
        if self.kind == "shuffled":
            return torch.randperm(len(self.sampler), generator=generator).numpy()  # type: ignore[return-value]
        with scoped(derive_seed(pass_seed)):  # the sampler may draw from any global generator
            sampler = _copy_with_generator(self.sampler, generator)
            for part in (sampler, getattr(sampler, "sampler", None)):
                if callable(set_epoch := getattr(part, "set_epoch", None)):
                    set_epoch(epoch)
            return list(sampler)

    def fingerprint(self) -> int:
        """Compute a checksum of the first epoch's order, to compare across ranks."""
        # One seed on all ranks, because the sampler may draw from the global generators.
        return zlib.crc32(repr(list(self.order(0, 0, 0))).encode())


def _is_plain(batches: Any) -> bool:
    """Whether this is torch's own `BatchSampler`, or torchdata's, which cuts in the same way."""
    own_iter = type(batches).__iter__ is BatchSampler.__iter__
    return isinstance(batches, BatchSampler) and (own_iter or is_torchdata(batches))


def is_torchdata(obj: Any) -> bool:
    """Whether torchdata defines the class of the object."""
    return type(obj).__module__.partition(".")[0] == "torchdata"


def _copy_with_generator(sampler: Iterable[Any], generator: torch.Generator) -> Any:
    """Copy the sampler for draws from ``generator``; the user's object stays unchanged."""
    if isinstance(inner := getattr(sampler, "sampler", None), Sampler):
        sampler = copy.copy(sampler)
        sampler.sampler = _copy_with_generator(inner, generator)  # type: ignore[attr-defined]
    if hasattr(sampler, "generator") and isinstance(sampler.generator, torch.Generator | None):
        sampler = copy.copy(sampler)
        sampler.generator = generator  # type: ignore[attr-defined]
    return sampler
