"""Streams (`IterableDataset`): this rank's part, and where to continue, told batch by batch.

The user's dataset is read inside the loader's workers. Every batch travels to the main process
together with the reading position of the worker that made it, so that only batches that were
*handed over* move the position that a checkpoint records. With several workers, the position is one
mark per worker and the worker whose turn it is.
"""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..support.random_states import derive_seed, scoped, seed_cpu
from .device import map_tensors
from .no_batch import NoBatch
from .order import RowPlan, stream_rows

_WITHIN_EPOCH, _AFTER_EPOCH = 1, 2

# {"read": items read, "state": the dataset's own state or None, "begin": at the start}
Mark = dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """One rank's batch as it comes from a worker."""

    worker: int
    batch: Any
    mark: Mark | None
    skip: int
    last: bool  # of this worker in this pass

    def pin_memory(self) -> Piece:
        """Called by the loader's pinning thread, which does not look into unknown containers."""
        pinned = map_tensors(self.batch, torch.Tensor.pin_memory, _pin_other)
        return Piece(self.worker, pinned, self.mark, self.skip, self.last)


def _pin_other(obj: Any) -> Any:
    return obj.pin_memory() if callable(getattr(obj, "pin_memory", None)) else obj


@dataclass(frozen=True)
class OutOfTurn:
    """Stands for a worker whose turn is over, so that a resumed loader begins with the right
    one.
    """


@dataclass
class StreamPosition:
    """Where each worker stands.

    Attributes:
        marks: by worker: the mark of its last batch that was handed over, rows to drop after it,
            and whether the worker has ended.
        turn: the worker that comes next.
    """

    marks: dict[int, tuple[Mark | None, int, bool]] = field(default_factory=dict)
    turn: int = 0

    def after(self, piece: Piece, workers: int) -> StreamPosition:
        """The position once ``piece`` was handed over."""
        marks = {**self.marks, piece.worker: (piece.mark, piece.skip, piece.last)}
        return StreamPosition(marks, (piece.worker + 1) % max(1, workers))

    def state_dict(self) -> dict[str, Any]:
        """Plain containers, for a checkpoint."""
        marks = {
            w: {"mark": mark, "skip": skip, "last": last}
            for w, (mark, skip, last) in self.marks.items()
        }
        return {"marks": marks, "turn": self.turn}

    @staticmethod
    def from_state(state: dict[str, Any]) -> StreamPosition:
        """The inverse of `state_dict`."""
        marks = {
            int(w): (entry["mark"], entry["skip"], entry["last"])
            for w, entry in state["marks"].items()
        }
        return StreamPosition(marks, state["turn"])


class StreamShard(IterableDataset):
    """Cuts the user's stream into rows and yields the collated cells of some ranks.

    It stands in for the user's dataset in a loader with ``batch_size=None``. What changes from pass
    to pass is in shared memory, because persistent workers never see this object again.

    Args:
        dataset: the user's.
        shape: batch per rank, world, tail and drop_last.
        ranks: whose cells are yielded, in rank order; one, or all for dispatch.
        collate: the user's ``collate_fn``; None hands items over one by one.
        sample_seed: seed each item from (seed, epoch, worker, place in the stream); None: leave
            alone.
        label: names rank and loader in messages.
        pads: ranks without a cell in a row get a `NoBatch`, so that all have equally many batches.
    """

    def __init__(
        self,
        dataset: Any,
        shape: RowPlan,
        ranks: Sequence[int],
        collate: Callable[[list[Any]], Any] | None,
        sample_seed: int | None,
        label: str,
        pads: bool = False,
    ) -> None:
        self.dataset = dataset
        self.pads = pads
        self.shape = shape
        self.ranks = list(ranks)
        self.collate = collate
        self.sample_seed = sample_seed
        self.label = label
        self.position = StreamPosition()
        self.control = torch.zeros(
            2, dtype=torch.int64, device="cpu"
        ).share_memory_()  # [epoch, what to do with position]

    def begin(self, epoch: int, position: StreamPosition, new_epoch: bool = False) -> None:
        """The next iteration continues at ``position``; with ``new_epoch`` that is the end of the
        last one.
        """
        self.position = position
        self.control[0] = epoch
        self.control[1] = 0 if not position.marks else _AFTER_EPOCH if new_epoch else _WITHIN_EPOCH
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[Piece | OutOfTurn]:
        worker = info.id if (info := get_worker_info()) is not None else 0
        epoch, resume = self.control.tolist()
        mark, skip, ended = (
            self.position.marks.get(worker, (None, 0, False)) if resume else (None, 0, False)
        )
        if resume == _WITHIN_EPOCH:
            if worker < self.position.turn:
                yield OutOfTurn()
            if ended:
                return
        if info is not None and callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        label = self.label if worker == 0 else None
        cursor = Cursor(self.dataset, self._seeds(epoch, worker))
        if resume == _AFTER_EPOCH:
            cursor.begin_after(mark)
            mark, skip = None, 0
        else:
            wraps = self.shape.tail in ("wrap", "level") and not self.shape.drop_last
            cursor.begin(mark, label, self.shape.row_items if wraps else 0)
        yield from self._pieces(cursor, worker, mark, skip)

    def _pieces(self, cursor: Cursor, worker: int, mark: Mark | None, skip: int) -> Iterator[Piece]:
        head = (lambda: cursor.head) if mark is not None else None
        for number, row in enumerate(stream_rows(cursor, self.shape, cursor.mark, head, mark)):
            if number < skip:
                continue
            for rank in self.ranks:
                if cell := row.cells[rank]:
                    batch = cell[0] if self.collate is None else self.collate(cell)
                    yield Piece(worker, batch, row.mark, row.skip, row.last)
                elif self.pads:
                    yield Piece(worker, NoBatch(), row.mark, row.skip, row.last)

    def _seeds(self, epoch: int, worker: int) -> Callable[[int], int] | None:
        if self.sample_seed is None:
            return None
        seed = self.sample_seed
        return lambda place: derive_seed(seed, epoch, worker, place)


class Cursor:
    """Reads the user's dataset and knows where it stands.

    A dataset, or the iterator that it returns, with ``state_dict`` and ``load_state_dict``
    continues by these. Any other is read from its beginning and what was handed over before is
    thrown away.
    """

    items: Iterator[Any]

    def __init__(self, dataset: Any, seeds: Callable[[int], int] | None) -> None:
        self.dataset = dataset
        self.read = 0
        self.seeds = seeds
        self.head: list[Any] = []
        self._begin = _state_of(dataset)
        self._peeked: list[Any] = []

    def begin(self, mark: Mark | None, label: str | None, head: int) -> None:
        """Continue at ``mark``, or begin the stream.

        The first ``head`` items are read before that, because the end of the stream may wrap around
        to them. Later would be too late: it would move a dataset that has just come to its end.
        """
        if mark is None:
            self.items = iter(self.dataset)
        elif mark["state"] is None:
            self.items = iter(self.dataset)
            self._skip(mark["read"], label, head)
        else:
            if head:
                self.begin_after({**mark, "state": mark["begin"]})
                self.head = self._peeked + list(
                    itertools.islice(self.items, head - len(self._peeked))
                )
                self._peeked = []
            self.read, self._begin = mark["read"], mark["begin"]
            self.items = self._load(mark["state"])

    def begin_after(self, mark: Mark | None) -> None:
        """Begin a new epoch of a stream whose last one ended at ``mark``.

        A dataset that resets itself at its end goes on from that state. One that does not would
        give an empty epoch: it is asked once more, as a run without a restart asks it after its
        end.
        """
        if mark is None or mark["state"] is None:
            self.items = iter(self.dataset)
            return
        self._begin = mark["state"]
        self.items = self._load(mark["state"])
        try:
            self._peeked = [self._next_item()]
        except StopIteration:
            self.items = iter(self.dataset)

    def _load(self, state: Any) -> Iterator[Any]:
        if state is None:
            return iter(self.dataset)
        if is_stateful(self.dataset):
            self.dataset.load_state_dict(copy.deepcopy(state))
            return iter(self.dataset)
        items: Any = iter(self.dataset)
        items.load_state_dict(copy.deepcopy(state))
        return items

    def _skip(self, count: int, label: str | None, head: int) -> None:
        """Read and drop; keeps the first ``head`` items."""
        progress = SkipProgress(count, label)
        kept: list[Any] = []
        while self.read < count:
            try:
                item = next(self)
            except StopIteration:
                raise RuntimeError(
                    f"{label or 'stream'}: {type(self.dataset).__name__} ended after {self.read}"
                    f" items while skipping the {count} that were handed over before the"
                    " checkpoint: it is not the same stream."
                ) from None
            if len(kept) < head:
                kept.append(item)
            progress.update(self.read)
        self.head = kept
        progress.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = self._peeked.pop() if self._peeked else self._next_item()
        self.read += 1
        return item

    def _next_item(self) -> Any:
        if self.seeds is None:
            return next(self.items)
        if get_worker_info() is not None:
            seed_cpu(self.seeds(self.read))
            return next(self.items)
        with scoped(self.seeds(self.read)):  # the main process needs its own generators back
            return next(self.items)

    def mark(self) -> Mark:
        """The position now; a copy, because a dataset may hand out its live state."""
        source = self.dataset if is_stateful(self.dataset) else self.items
        return {"read": self.read, "state": _state_of(source), "begin": self._begin}


class SkipProgress:
    """A progress line on stderr, at most one a second."""

    def __init__(self, total: int, label: str | None) -> None:
        self.total, self.label = total, label
        self.last_s = time.monotonic()

    def update(self, done: int) -> None:
        """Show ``done`` items of the total."""
        if self.label is not None and time.monotonic() - self.last_s > 1.0:
            self.last_s = time.monotonic()
            print(
                f"\r{self.label}: skipping {done}/{self.total} items",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        """End the line."""
        if self.label is not None and self.total > 0:
            print(
                f"\r{self.label}: skipped {self.total}/{self.total} items",
                file=sys.stderr,
                flush=True,
            )


def is_stateful(obj: Any) -> bool:
    """Whether the object can say where it stands and go back there."""
    return callable(getattr(obj, "state_dict", None)) and callable(
        getattr(obj, "load_state_dict", None)
    )


def _state_of(obj: Any) -> Any:
    return copy.deepcopy(obj.state_dict()) if is_stateful(obj) else None
