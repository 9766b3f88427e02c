"""Where a loader's batches come from: a map-style dataset or a stream, as (batch, position) pairs.

A feed knows nothing about epochs' bookkeeping or devices; it starts at a position and says, with
every batch, the position after it. `loader` decides which position counts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from ..rng import derive_seed
from .nobatch import NoBatch
from .options import DataOptions, Stage
from .order import RowPlan, batches_before
from .sampler import ShardSampler
from .seeding import SeededDataset
from .source import MapSource, read_source, unwrap_index_recorder
from .stream import OutOfTurn, Piece, StreamPosition, StreamShard, is_stateful

Pairs = Iterator[tuple[Any, Any]]


class Feed(Protocol):
    """What `ShardedLoader` needs to know of its data."""

    inner: DataLoader
    label: str
    ranks_read: int  # ranks whose batches each row of the inner loader holds
    row_samples: int  # samples that all ranks together get in one row

    def start(self, epoch: int, cycle: int, position: Any, new_epoch: bool) -> Pairs:
        """Batches from ``position`` on, each with the position after it."""
        ...

    def batches_per_rank(self) -> list[int] | None:
        """Batches of every rank in a whole epoch; None if unknown."""
        ...

    def done_before(self, position: Any) -> int | None:
        """This rank's batches that count as done at ``position``; None: as many as were counted."""
        ...

    def describe(self) -> dict[str, Any]:
        """What must be the same when a state is loaded."""
        ...

    def save(self, position: Any) -> Any:
        """A position as plain containers."""
        ...

    def load(self, state: Any, saved: dict[str, Any]) -> Any:
        """The inverse of `save`; raises if ``saved`` describes other data."""
        ...

    def length(self) -> int | None:
        """This rank's batches in a whole epoch; None if unknown."""
        ...

    def finished(self, position: Any) -> bool:
        """Whether nothing is left after ``position``."""
        ...

    def after_rows(self, rows: int) -> Any:
        """The position after some rows of an epoch, None if it has to be read to be known."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Lengths asked for from now on are those of this epoch."""
        ...

    def reseed(self, seed: int) -> None:
        """Draw orders from another seed, that of the run which is resumed."""
        ...

    def rewind(self) -> None:
        """The pass that began last is given up and begins again."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


def copy_loader(loader: DataLoader, **replaced: Any) -> DataLoader:
    """The user's loader with other attributes, class and all; the user's object stays as it is.

    Past ``__setattr__``, which refuses these after construction. A `StatefulDataLoader` becomes a plain
    loader: its own state would count what was fetched.
    """
    if type(loader).__module__.partition(".")[0] == "torchdata":
        attributes = {name: value for name, value in vars(loader).items() if not name.startswith("_StatefulDataLoader")}
        clone = DataLoader.__new__(DataLoader)
        clone.__dict__.update(attributes)
        clone.__dict__.setdefault("_DataLoader__initialized", True)
    else:
        clone = copy.copy(loader)
    clone.__dict__.update(_iterator=None, **replaced)
    return clone


def close_loader(loader: DataLoader) -> None:
    """End persistent workers; the next iteration starts new ones."""
    iterator = loader.__dict__.get("_iterator")
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
    loader.__dict__["_iterator"] = None


class MapFeed:
    """Batches of a map-style dataset; the position is the number of items of the order used up."""

    def __init__(
        self, loader: DataLoader, options: DataOptions, stage: Stage, rank: int, world: int, seed: int, label: str
    ) -> None:
        self.label = label
        self.rank = rank
        self.source: MapSource = read_source(loader, label)
        self.sampler = ShardSampler(self.source, options, stage, rank, world, seed)
        if options.sharding == "dispatch":
            self.sampler.ranks = list(range(world))
        self.ranks_read = len(self.sampler.ranks)
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
        ranks = self.ranks_read
        # The usual row by multiplication: this runs for every batch, and batches can be tiny.
        row_items = plan.row_items
        usual = (plan.items - start) // row_items - 1 if self.source.sized else 0
        for number, batch in enumerate(iter(self.inner)):
            row = number // ranks + 1
            yield batch, start + row * row_items if row < usual else self.sampler.plan().handed_over(row)
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

    def done_before(self, position: int | None) -> int:
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
        for name, meaning in (("unit", "counts"), ("order", "draws its order as"), ("items", "length")):
            if saved[name] != mine[name]:
                raise ValueError(
                    f"{self.label}: the checkpoint's loader differs from this one: {meaning} {saved[name]!r} then,"
                    f" {mine[name]!r} now. Position {state} would mean other samples. HINT: resume with the same"
                    " dataset and sampler, or start a new run from the weights only."
                )
        if saved["generator"] is not None:
            object.__setattr__(self.source, "generator_state", saved["generator"])
            self.sampler._cached = None
        return state

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


class StreamFeed:
    """Batches of an `IterableDataset`; the position is a `StreamPosition`."""

    def __init__(
        self, loader: DataLoader, options: DataOptions, stage: Stage, rank: int, world: int, seed: int, label: str
    ) -> None:
        self.label = label
        self.rank = rank
        self.seed = seed
        self.own = options.streams == "own"
        self.shape = self._shape(loader, options, stage, 1 if self.own else world)
        ranks = range(world) if options.sharding == "dispatch" else [0 if self.own else rank]
        self.ranks_read = len(ranks)
        self.row_samples = self.shape.batch * world
        sample_seed = seed if options.per_sample_seed else None
        collate = None if loader.batch_size is None else loader.collate_fn
        pads = stage != "fit" and not self.own and not hasattr(loader.dataset, "__len__")
        self.shard = StreamShard(loader.dataset, self.shape, ranks, collate, sample_seed, label, pads)
        self.inner = copy_loader(
            loader,
            dataset=self.shard,
            batch_size=None,
            batch_sampler=None,
            drop_last=False,
            collate_fn=_as_it_is if collate is not None else _ConvertPiece(loader.collate_fn),
            generator=torch.Generator(),
        )
        self.user_dataset = loader.dataset
        self.workers = loader.num_workers
        self._begin_state: Any = None  # of the user's object when the newest pass began
        self._rewind_to: Any = None

    def _shape(self, loader: DataLoader, options: DataOptions, stage: Stage, world: int) -> RowPlan:
        batch = loader.batch_size or 1
        if options.sharding == "split" and world > 1:
            if batch % world:
                raise ValueError(
                    f'{self.label}: sharding="split" cuts each batch in {world} equal parts, but batch_size is'
                    f' {loader.batch_size}. HINT: use a multiple of {world}, or sharding="batch".'
                )
            batch //= world
        return RowPlan(0, batch, world, options.tail_for(stage, world), loader.drop_last)

    def start(self, epoch: int, cycle: int, position: StreamPosition | None, new_epoch: bool) -> Pairs:
        """See `Feed`."""
        position = position or StreamPosition()
        if self._rewind_to is not None and not position.marks:
            mark = {"read": 0, "state": self._rewind_to, "begin": self._rewind_to}
            position, new_epoch = StreamPosition({0: (mark, 0, False)}), True
        keeps_objects = self.workers == 0 or self.inner.persistent_workers
        if new_epoch and not keeps_objects:
            position = StreamPosition()  # fresh workers copy the dataset as the main process has it
        self._rewind_to = None
        self._begin_state = self._state_at_begin(position, new_epoch)
        if position.marks:
            self.close()  # persistent workers do not see a new position
        self.shard.begin(epoch, position, new_epoch)
        self.inner.generator.manual_seed(derive_seed(self.seed, epoch, cycle, self.rank, _items_read(position)))
        after = StreamPosition() if new_epoch else position
        for piece in iter(self.inner):
            if isinstance(piece, OutOfTurn):
                continue
            assert isinstance(piece, Piece)
            after = after.after(piece, self.workers)
            yield piece.batch, after

    def _state_at_begin(self, position: StreamPosition, new_epoch: bool) -> Any:
        """Of the user's own object where the pass began; None if workers read copies of it."""
        if self.workers > 0 or not is_stateful(self.user_dataset):
            return None
        mark, _, _ = position.marks.get(0, (None, 0, False))
        if mark is not None:
            return mark["state"] if new_epoch else mark["begin"]
        return copy.deepcopy(self.user_dataset.state_dict())

    def batches_per_rank(self) -> list[int] | None:
        """See `Feed`. With several workers: if each reads every n-th item, the usual way."""
        if self.own or not hasattr(self.user_dataset, "__len__"):
            return None
        return [sum(plan.batches(rank) for plan in self._worker_plans()) for rank in range(self.shape.world)]

    def _worker_plans(self) -> list[RowPlan]:
        size, workers = len(self.user_dataset), max(1, self.workers)
        shape = self.shape
        return [
            RowPlan(math.ceil(max(0, size - w) / workers), shape.batch, shape.world, shape.tail, shape.drop_last)
            for w in range(workers)
        ]

    def length(self) -> int | None:
        """Batches of this rank in a whole epoch, None if unknown."""
        if not hasattr(self.user_dataset, "__len__"):
            return None
        return sum(plan.batches(0 if self.own else self.rank) for plan in self._worker_plans())

    def done_before(self, position: StreamPosition) -> int | None:
        """See `Feed`."""
        return None

    def finished(self, position: StreamPosition) -> bool:
        """Whether every worker has ended."""
        ended = [last for _, _, last in position.marks.values()]
        return len(ended) == max(1, self.workers) and all(ended)

    def describe(self) -> dict[str, Any]:
        """See `Feed`."""
        return {"kind": "stream", "workers": self.workers, "own": self.own, "dataset": type(self.user_dataset).__name__}

    def save(self, position: StreamPosition | None) -> dict[str, Any]:
        """See `Feed`."""
        return (position or StreamPosition()).state_dict()

    def load(self, state: dict[str, Any], saved: dict[str, Any]) -> StreamPosition:
        """See `Feed`."""
        if max(1, saved["workers"]) != max(1, self.workers):
            raise ValueError(
                f"{self.label}: the checkpoint was made with num_workers={saved['workers']}, this loader has"
                f" {self.workers}. Each worker reads a part of the stream of its own, so its position means nothing"
                f" to another number of workers. HINT: resume with num_workers={saved['workers']}."
            )
        return StreamPosition.from_state(state)

    def after_rows(self, rows: int) -> None:
        """See `Feed`."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """See `Feed`."""

    def reseed(self, seed: int) -> None:
        """See `Feed`."""
        self.seed = seed
        if self.shard.sample_seed is not None:
            self.close()
            self.shard.sample_seed = seed

    def rewind(self) -> None:
        """See `Feed`. Without workers the user's own object has moved on and has to go back."""
        self._rewind_to = self._begin_state

    def close(self) -> None:
        """See `Feed`."""
        close_loader(self.inner)


def _items_read(position: StreamPosition) -> int:
    return sum(mark["read"] for mark, _, _ in position.marks.values() if mark is not None)


def _as_it_is(piece: Piece) -> Piece:
    return piece


class _ConvertPiece:
    """Applies the loader's own conversion to the item inside, for ``batch_size=None``."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def __call__(self, piece: Any) -> Any:
        if isinstance(piece, OutOfTurn) or isinstance(piece.batch, NoBatch):
            return piece
        return Piece(piece.worker, self.convert(piece.batch), piece.mark, piece.skip, piece.last)
