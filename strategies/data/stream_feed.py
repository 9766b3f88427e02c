"""Batches of an `IterableDataset`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..support.random_states import derive_seed
from .base_feed import Pairs, close_loader, copy_loader
from .no_batch import NoBatch
from .options import DataOptions, Stage
from .order import RowPlan
from .stream import OutOfTurn, Piece, StreamPosition, StreamShard, is_stateful


class StreamFeed:
    """Batches of an `IterableDataset`; the position is a `StreamPosition`."""

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
        self.seed = seed
        self.own = options.streams == "own"
        self.shape = self._shape(loader, options, stage, 1 if self.own else world)
        ranks = range(world) if options.sharding == "dispatch" else [0 if self.own else rank]
        self.row_samples = self.shape.batch * world
        sample_seed = seed if options.per_sample_seed else None
        collate = None if loader.batch_size is None else loader.collate_fn
        pads = stage != "fit" and not self.own and not hasattr(loader.dataset, "__len__")
        self.shard = StreamShard(
            loader.dataset, self.shape, ranks, collate, sample_seed, label, pads
        )
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
                    f'{self.label}: sharding="split" cuts each batch in {world} equal parts, but'
                    f" batch_size is {loader.batch_size}. HINT: use a multiple of {world}, or"
                    ' sharding="batch".'
                )
            batch //= world
        return RowPlan(0, batch, world, options.tail_for(stage, world), loader.drop_last)

    def start(
        self, epoch: int, cycle: int, position: StreamPosition | None, new_epoch: bool
    ) -> Pairs:
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
        self.inner.generator.manual_seed(
            derive_seed(self.seed, epoch, cycle, self.rank, _items_read(position))
        )
        after = StreamPosition() if new_epoch else position
        for piece in iter(self.inner):
            if isinstance(piece, OutOfTurn):
                continue
            assert isinstance(piece, Piece)
            after = after.after(piece, self.workers)
            batch = piece.batch
            del piece
            yield batch, after
            del batch

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
        return [
            sum(plan.batches(rank) for plan in self._worker_plans())
            for rank in range(self.shape.world)
        ]

    def _worker_plans(self) -> list[RowPlan]:
        size, workers = len(self.user_dataset), max(1, self.workers)
        shape = self.shape
        return [
            RowPlan(
                math.ceil(max(0, size - w) / workers),
                shape.batch,
                shape.world,
                shape.tail,
                shape.drop_last,
            )
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
        return {
            "kind": "stream",
            "workers": self.workers,
            "own": self.own,
            "dataset": type(self.user_dataset).__name__,
        }

    def save(self, position: StreamPosition | None) -> dict[str, Any]:
        """See `Feed`."""
        return (position or StreamPosition()).state_dict()

    def load(self, state: dict[str, Any], saved: dict[str, Any]) -> StreamPosition:
        """See `Feed`."""
        if max(1, saved["workers"]) != max(1, self.workers):
            raise ValueError(
                f"{self.label}: the checkpoint was made with num_workers={saved['workers']}, this"
                f" loader has {self.workers}. Each worker reads a part of the stream of its own, so"
                " its position means nothing to another number of workers. HINT: resume with"
                f" num_workers={saved['workers']}."
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
