"""The data of a user's `DataLoader` and its order, a function of (seed, epoch, pass)."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ..support.random_states import derive_seed, scoped

Kind = Literal["sequential", "shuffled", "custom", "batches"]


@dataclass
class MapSource:
    """The order in which a map-style loader reads.

    Attributes:
        kind: "sequential"; "shuffled" (`RandomSampler`); "custom": any other sampler; "batches": a
            custom batch sampler.
        sampler: the user's sampler or batch sampler.
        batch_size: samples in one of the user's batches; 1 where the items of the order are whole
            batches.
        drop_last: the user's choice.
        is_collated: False with ``batch_size=None``, where each item of the order is loaded alone.
        has_batch_items: an item of the order is a whole batch (a list of indices).
        is_sharded_by_user: the sampler is a `DistributedSampler`, whose items are for this rank.
        seed: the first seed of the sampler's own generator, which becomes that of the loader.
        label: names rank and loader in errors.
    """

    kind: Kind
    sampler: Any
    batch_size: int
    drop_last: bool
    is_collated: bool
    has_batch_items: bool
    is_sharded_by_user: bool
    seed: int | None
    label: str

    def order(self, seed: int, epoch: int, cycle: int) -> Sequence[Any]:
        """Draw the items of one pass over the data; ``cycle`` counts passes within the epoch."""
        if self.kind == "sequential":
            return range(len(self.sampler))
        pass_seed = _pass_seed(seed, epoch, cycle)
        if self.kind == "shuffled":
            return self._draw_shuffled(torch.Generator().manual_seed(pass_seed))
        with scoped(derive_seed(pass_seed)):  # the sampler may draw from any global generator
            items = list(self._make_epoch_sampler(pass_seed, epoch))
        if self.has_batch_items or self.kind == "custom":
            return items
        return [index for batch in items for index in batch]

    def _make_epoch_sampler(self, pass_seed: int, epoch: int) -> Any:
        sampler = _copy_with_generator(self.sampler, torch.Generator().manual_seed(pass_seed))
        _set_epoch(sampler, epoch)
        return sampler

    def _draw_shuffled(self, generator: torch.Generator) -> Any:
        sampler = self.sampler
        count, size = sampler.num_samples, len(sampler.data_source)
        if not sampler.replacement and count == size:
            return torch.randperm(size, generator=generator).numpy()
        plain = RandomSampler(range(size), sampler.replacement, count, generator)
        return np.fromiter(plain, np.int64)

    def fingerprint(self, seed: int) -> int:
        """Compute a checksum of the first epoch's order, to compare across ranks."""
        return zlib.crc32(repr(list(self.order(seed, 0, 0))).encode())


def read_source(loader: DataLoader, label: str) -> MapSource:
    """Describe the order of a map-style loader; ``label`` names rank and loader in errors.

    Raises:
        ValueError: the sampler has no length.
    """
    batches = unwrap_index_recorder(loader.batch_sampler)
    is_plain = batches is not None and _is_plain(batches)
    sampler: Any = loader.sampler if batches is None else batches.sampler if is_plain else batches
    try:
        len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise ValueError(
            f"{label}: {type(sampler).__name__} has no length, without which nothing tells where"
            " an epoch ends.\nGive the sampler a `__len__`, or set"
            " Trainer(use_distributed_sampler=False) and share out the data yourself."
        ) from error
    if batches is None:
        return _describe_sampler(sampler, 1, False, label, is_collated=False)
    if is_plain:
        return _describe_sampler(sampler, batches.batch_size, batches.drop_last, label)
    return _describe_batches(batches, label)


def unwrap_index_recorder(batch_sampler: Any) -> Any:
    """Return the batch sampler inside Lightning's recorder of indices, or the sampler itself."""
    # For prediction, Lightning wraps the batch sampler.
    is_recorder = isinstance(batch_sampler, _IndexBatchSamplerWrapper)
    return batch_sampler._batch_sampler if is_recorder else batch_sampler


def _is_plain(batches: Any) -> bool:
    """Whether this is torch's own `BatchSampler`, or torchdata's, which cuts in the same way."""
    own_iter = type(batches).__iter__ is BatchSampler.__iter__
    return isinstance(batches, BatchSampler) and (own_iter or is_torchdata(batches))


def is_torchdata(obj: Any) -> bool:
    """Whether torchdata defines the class of the object."""
    return type(obj).__module__.partition(".")[0] == "torchdata"


def _describe_sampler(
    sampler: Any,
    batch_size: int,
    drop_last: bool,
    label: str,
    is_collated: bool = True,
) -> MapSource:
    generator: Any = None if is_torchdata(sampler) else getattr(sampler, "generator", None)
    kind: Kind = "custom"
    if type(sampler) is SequentialSampler:
        kind = "sequential"
    elif type(sampler) is RandomSampler or (
        is_torchdata(sampler) and type(sampler).__name__ == "RandomSampler"
    ):
        kind = "shuffled"
    return MapSource(
        kind=kind,
        sampler=sampler,
        batch_size=batch_size,
        drop_last=drop_last,
        is_collated=is_collated,
        has_batch_items=False,
        is_sharded_by_user=isinstance(sampler, DistributedSampler),
        seed=generator.initial_seed() if isinstance(generator, torch.Generator) else None,
        label=label,
    )


def _describe_batches(batches: Any, label: str) -> MapSource:
    """Describe a custom batch sampler.

    If the batches of the first epoch have one size, batches are cut anew from the samples of all;
    a batch sampler with other sizes keeps its batches whole.
    """
    batch_size: Any = getattr(batches, "batch_size", None)
    first: list[Any] = []
    if isinstance(batch_size, int):
        with scoped():
            first = list(batches)
    has_fixed_size = (
        isinstance(batch_size, int)
        and all(len(batch) == batch_size for batch in first[:-1])
        and len((first or [[]])[-1]) <= batch_size
    )
    return MapSource(
        kind="batches",
        sampler=batches,
        batch_size=batch_size if has_fixed_size else 1,
        drop_last=bool(getattr(batches, "drop_last", False)),
        is_collated=True,
        has_batch_items=not has_fixed_size,
        is_sharded_by_user=isinstance(getattr(batches, "sampler", None), DistributedSampler),
        seed=None,
        label=label,
    )


def _pass_seed(seed: int, epoch: int, cycle: int) -> int:
    return seed + epoch if cycle == 0 else derive_seed(seed, epoch, cycle)


def _copy_with_generator(sampler: Iterable[Any], generator: torch.Generator) -> Any:
    """Copy the sampler for draws from ``generator``; the user's object stays unchanged."""
    if isinstance(sampler, list | tuple | range):
        return sampler
    if isinstance(inner := getattr(sampler, "sampler", None), torch.utils.data.Sampler):
        sampler = copy.copy(sampler)
        sampler.sampler = _copy_with_generator(inner, generator)  # type: ignore[attr-defined]
    if hasattr(sampler, "generator") and isinstance(sampler.generator, torch.Generator | None):
        sampler = copy.copy(sampler)
        sampler.generator = generator  # type: ignore[attr-defined]
    return sampler


def _set_epoch(sampler: Any, epoch: int) -> None:
    for part in (sampler, getattr(sampler, "sampler", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
