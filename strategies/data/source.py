"""What a user's `DataLoader` reads, and in which order: a function of (seed, epoch, pass)."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ..support.random_states import derive_seed, scoped
from .unsized_order import UnsizedOrder

_COMPARED = 1024  # items of an order without a length that are compared across ranks
Kind = Literal["sequential", "shuffled", "drawn", "custom", "batches"]


@dataclass
class MapSource:
    """The order in which a map-style loader reads.

    Attributes:
        kind: "sequential"; "shuffled" (`RandomSampler`); "drawn": a sampler with the user's own
            generator, whose successive draws are the epochs' orders; "custom": any other sampler;
            "batches": a custom batch sampler.
        sampler: the user's sampler or batch sampler.
        batch: samples in one of the user's batches; 1 where the items of the order are whole
            batches.
        drop_last: the user's choice.
        collated: False with ``batch_size=None``: an item of the order is loaded by itself.
        opaque: an item of the order is a whole batch (a list of indices).
        sharded_by_user: a `DistributedSampler`: what it yields is this rank's already.
        generator_state: of the user's own generator when the loader was set up, or of the run that
            is resumed.
        shares_generator: the loader draws its workers' seed from that generator too, before the
            sampler.
        sized: the sampler says how many items it yields; otherwise it may never end.
        size: samples in the dataset, None if it has no length.
        label: names rank and loader in errors.
    """

    kind: Kind
    sampler: Any
    batch: int
    drop_last: bool
    collated: bool
    opaque: bool
    sharded_by_user: bool
    generator_state: torch.Tensor | None
    shares_generator: bool
    sized: bool
    size: int | None
    label: str

    def order(self, seed: int, epoch: int, cycle: int) -> Sequence[Any]:
        """The items of one pass over the data; ``cycle`` counts passes within the epoch."""
        if not self.sized:
            return self._draw_unsized(seed, epoch, cycle)
        order = self._draw(seed, epoch, cycle)
        if self.kind not in ("sequential", "shuffled"):
            self._check_range(order, 0, epoch)
        return order

    def _draw(self, seed: int, epoch: int, cycle: int) -> Sequence[Any]:
        if self.kind == "sequential":
            return range(len(self.sampler))
        if self.kind == "drawn":
            return self._draw_from_user_generator(epoch, cycle)
        pass_seed = _pass_seed(seed, epoch, cycle)
        if self.kind == "shuffled":
            return self._shuffle(torch.Generator().manual_seed(pass_seed))
        with scoped(derive_seed(pass_seed)):  # it may draw from any global generator
            items = list(self._of_epoch(pass_seed, epoch))
        return items if self.opaque or self.kind == "custom" else self._flatten(items, epoch)

    def _of_epoch(self, pass_seed: int, epoch: int) -> Any:
        sampler = _reseeded(self.sampler, torch.Generator().manual_seed(pass_seed))
        _set_epoch(sampler, epoch)
        return sampler

    def _draw_unsized(self, seed: int, epoch: int, cycle: int) -> UnsizedOrder:
        # the user's own: its successive draws have no end to begin the next epoch at
        if self.generator_state is not None:
            seed = _generator_in(self.generator_state).initial_seed()
        pass_seed = _pass_seed(seed, epoch, cycle)
        check = partial(self._check_range, epoch=epoch)
        return UnsizedOrder(lambda: self._of_epoch(pass_seed, epoch), derive_seed(pass_seed), check)

    def _shuffle(self, generator: torch.Generator) -> Sequence[Any]:
        sampler = self.sampler
        count, size = sampler.num_samples, len(sampler.data_source)
        if not sampler.replacement and count == size:
            return torch.randperm(size, generator=generator).numpy()
        plain = RandomSampler(range(size), sampler.replacement, count, generator)
        return np.fromiter(plain, np.int64)

    def _draw_from_user_generator(self, epoch: int, cycle: int) -> Sequence[Any]:
        assert self.generator_state is not None
        generator = _generator_in(self.generator_state)
        if cycle:
            generator.manual_seed(derive_seed(generator.initial_seed(), epoch, cycle))
        sampler = _reseeded(self.sampler, generator)
        for _ in range(1 if cycle else epoch + 1):
            if self.shares_generator:
                torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator)
            items = list(sampler)
        return items

    def _flatten(self, batches: list[Any], epoch: int) -> list[Any]:
        sizes = {len(batch) for batch in batches[:-1]}
        if sizes - {self.batch} or (batches and len(batches[-1]) > self.batch):
            raise ValueError(
                f"{self.label}: batch sampler {type(self.sampler).__name__} has"
                f" batch_size={self.batch}, but its batches of epoch {epoch} have other sizes too"
                f" ({sorted(sizes | {len(batches[-1])})}). Its first epoch had not. HINT: remove"
                " its `batch_size` attribute, then batches are kept whole."
            )
        return [index for batch in batches for index in batch]

    def _check_range(self, order: Sequence[Any], first: int, epoch: int) -> None:
        if self.size is None or not len(order):
            return
        flat = [i for batch in order for i in batch] if self.opaque else order
        if not flat or not all(
            isinstance(i, int | np.integer | torch.Tensor) for i in (flat[0], flat[-1])
        ):
            return  # keys of another kind: the dataset knows
        values = np.asarray(flat)
        bad = np.flatnonzero((values >= self.size) | (values < -self.size))
        if values.dtype.kind in "iu" and bad.size:
            raise IndexError(
                f"{self.label}: {type(self.sampler).__name__} yields index {values[bad[0]]} (place"
                f" {first + bad[0]} of epoch {epoch}; {bad.size} such in all), but the dataset has"
                f" {self.size} samples, so 0 to {self.size - 1} are valid. HINT: was the sampler"
                " made for another dataset?"
            )

    def fingerprint(self, seed: int) -> int:
        """A checksum of the first epoch's order (if it has no length, of its beginning), to compare
        across ranks.
        """
        order = self.order(seed, 0, 0)
        if isinstance(order, UnsizedOrder):
            order = order[0:_COMPARED]
        return zlib.crc32(repr(order if isinstance(order, range) else list(order)).encode())


def read_source(loader: DataLoader, label: str) -> MapSource:
    """Describe a map-style loader."""
    size = len(loader.dataset) if hasattr(loader.dataset, "__len__") else None  # type: ignore[arg-type]
    batches = unwrap_index_recorder(loader.batch_sampler)
    if batches is None:
        return _describe(loader, loader.sampler, 1, False, size, label, collated=False)
    if _is_plain(batches):
        return _describe(
            loader, batches.sampler, batches.batch_size, batches.drop_last, size, label
        )
    return _describe_batches(batches, size, label)


def unwrap_index_recorder(batch_sampler: Any) -> Any:
    """The batch sampler inside the recorder that Lightning puts around it for prediction."""
    is_recorder = type(batch_sampler).__name__ == "_IndexBatchSamplerWrapper"
    return batch_sampler._batch_sampler if is_recorder else batch_sampler


def _is_plain(batches: Any) -> bool:
    """torch's own `BatchSampler`, or torchdata's, which batches in the same way."""
    own_iter = type(batches).__iter__ is BatchSampler.__iter__
    return isinstance(batches, BatchSampler) and (own_iter or _is_torchdata(batches))


def _is_torchdata(obj: Any) -> bool:
    return type(obj).__module__.partition(".")[0] == "torchdata"


def _describe(
    loader: DataLoader,
    sampler: Any,
    batch: int,
    drop_last: bool,
    size: int | None,
    label: str,
    collated: bool = True,
) -> MapSource:
    generator = None if _is_torchdata(sampler) else getattr(sampler, "generator", None)
    kind: Kind = "custom"
    if type(sampler) is SequentialSampler:
        kind = "sequential"
    elif isinstance(generator, torch.Generator):
        kind = "drawn"
    elif type(sampler) is RandomSampler or (
        _is_torchdata(sampler) and type(sampler).__name__ == "RandomSampler"
    ):
        kind = "shuffled"
    return MapSource(
        kind=kind,
        sampler=sampler,
        batch=batch,
        drop_last=drop_last,
        collated=collated,
        opaque=False,
        sharded_by_user=isinstance(sampler, DistributedSampler),
        generator_state=generator.get_state() if kind == "drawn" else None,
        shares_generator=generator is not None and loader.generator is generator,
        sized=_is_sized(sampler),
        size=size,
        label=label,
    )


def _describe_batches(batches: Any, size: int | None, label: str) -> MapSource:
    """A custom batch sampler: batches of one size are samples in disguise, others are kept
    whole.
    """
    batch = getattr(batches, "batch_size", None)
    sized = _is_sized(batches)
    first: list[Any] = []
    if isinstance(batch, int) and sized:
        with scoped():
            first = list(batches)
    fixed = (
        sized
        and isinstance(batch, int)
        and all(len(b) == batch for b in first[:-1])
        and len((first or [[]])[-1]) <= batch
    )
    return MapSource(
        kind="batches",
        sampler=batches,
        batch=batch if fixed else 1,
        drop_last=bool(getattr(batches, "drop_last", False)),
        collated=True,
        opaque=not fixed,
        sharded_by_user=isinstance(getattr(batches, "sampler", None), DistributedSampler),
        generator_state=None,
        shares_generator=False,
        sized=sized,
        size=size,
        label=label,
    )


def _pass_seed(seed: int, epoch: int, cycle: int) -> int:
    return seed + epoch if cycle == 0 else derive_seed(seed, epoch, cycle)


def _generator_in(state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(state)
    return generator


def _is_sized(sampler: Any) -> bool:
    try:
        len(sampler)
    except (TypeError, NotImplementedError):
        return False
    return True


def _reseeded(sampler: Iterable[Any], generator: torch.Generator) -> Any:
    """A copy of the sampler that draws from ``generator``; the user's object stays as it is."""
    if isinstance(sampler, list | tuple | range):
        return sampler
    if isinstance(inner := getattr(sampler, "sampler", None), torch.utils.data.Sampler):
        sampler = copy.copy(sampler)
        sampler.sampler = _reseeded(inner, generator)  # type: ignore[attr-defined]
    if hasattr(sampler, "generator") and isinstance(sampler.generator, torch.Generator | None):
        sampler = copy.copy(sampler)
        sampler.generator = generator  # type: ignore[attr-defined]
    return sampler


def _set_epoch(sampler: Any, epoch: int) -> None:
    for part in (sampler, getattr(sampler, "sampler", None)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
