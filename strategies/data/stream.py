"""Streams (`IterableDataset`): the cut of this rank's part, and the position after each batch.

The loader's workers read the user's dataset. Every batch travels to the main process together with
the reading position of its worker, so that only batches that were *handed over* move the position
that a checkpoint records. With several workers, the position is one mark per worker and the worker
whose turn it is.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypedDict

import torch
from torch.utils.data import IterableDataset, get_worker_info
from tqdm import tqdm  # type: ignore[import-untyped]

from ..support.random_states import derive_seed, seed_cpu
from .no_batch import NoBatch
from .order import Mark, RowEnd, RowPlan, stream_rows
from .seeding import draw_apart
from .tensor_pickle import checksum

# How a pass uses its position: not at all, or to continue the epoch or begin the next one there.
_FROM_BEGINNING, _WITHIN_EPOCH, _AFTER_EPOCH = 0, 1, 2


class WorkerRow(NamedTuple):
    """The batches of one row as they come from a worker, with the position after them.

    The pinning thread looks into tuples (`torch.utils.data._utils.pin_memory`).
    """

    worker: int
    batches: list[Any]  # of the ranks that are asked for and have one
    end: RowEnd
    first_sample: int | None  # the checksum of the pass's first sample, with the worker's first row


class StreamPosition(TypedDict):
    """The reading positions of all workers."""

    marks: dict[int, RowEnd]  # by worker, the end of its last row that was handed over
    turn: int  # the worker whose row comes next


BEGINNING: StreamPosition = {"marks": {}, "turn": 0}


def advance(position: StreamPosition, row: WorkerRow, workers: int) -> StreamPosition:
    """Return the position after ``row``, which came after ``position``."""
    marks = {**position["marks"], row.worker: row.end}
    return {"marks": marks, "turn": (row.worker + 1) % max(1, workers)}


class StreamShard(IterableDataset):
    """Cuts the user's stream into rows and yields the collated cells of some ranks.

    The shard replaces the user's dataset in a loader with ``batch_size=None``. The values that
    change from pass to pass are in shared memory, because persistent workers keep their first copy
    of this object.

    Args:
        dataset: the user's dataset.
        shape: batch per rank, world, tail and drop_last.
        ranks: the ranks whose cells are yielded, in rank order; one rank, or all for dispatch.
        collate: the user's ``collate_fn``.
        is_batched: whether ``collate`` gets lists of items, or items one by one.
        per_sample: seed each item by its place in the stream, not each row.
        label: names rank and loader in messages.
        needs_padding: ranks without a cell in a row get a `NoBatch`, so that all ranks have equally
            many batches.
    """

    def __init__(
        self,
        dataset: Any,
        shape: RowPlan,
        ranks: Sequence[int],
        collate: Callable[[Any], Any],
        is_batched: bool,
        per_sample: bool,
        label: str,
        needs_padding: bool,
    ) -> None:
        self.dataset = dataset
        self.needs_padding = needs_padding
        self.shape = shape
        self.ranks = ranks
        self.collate = collate
        self.is_batched = is_batched
        self.items_per_seed = 1 if per_sample else shape.row_items
        self.label = label
        self.position = BEGINNING
        self.begin_state: Any = None  # of the dataset in this process, when the newest pass began
        # [epoch, resume mode, seed of the random numbers]
        self.control = torch.zeros(3, dtype=torch.int64, device="cpu").share_memory_()

    def begin_pass(
        self, epoch: int, position: StreamPosition, is_new_epoch: bool = False, seed: int = 0
    ) -> None:
        """Make the next iteration continue at ``position``, with random numbers from ``seed``.

        With ``is_new_epoch``, ``position`` is the end of the epoch before.
        """
        self.position = position
        resume_mode = _AFTER_EPOCH if is_new_epoch else _WITHIN_EPOCH
        self.control[0], self.control[2] = epoch, seed
        self.control[1] = resume_mode if position["marks"] else _FROM_BEGINNING
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[WorkerRow | None]:
        return self._iterate() if get_worker_info() is not None else draw_apart(self._iterate())

    def _iterate(self) -> Iterator[WorkerRow | None]:
        worker = info.id if (info := get_worker_info()) is not None else 0
        epoch, resume_mode, seed = self.control.tolist()
        seed = derive_seed(seed, worker)
        mark, rows_to_skip, has_ended = None, 0, False
        if resume_mode != _FROM_BEGINNING:
            mark, rows_to_skip, has_ended = self.position["marks"].get(worker, (None, 0, False))
        if resume_mode == _WITHIN_EPOCH:
            if worker < self.position["turn"]:
                # `DataLoader` asks its workers in turn, from worker 0 on. With this, the first row
                # is that of the right one.
                yield None
            if has_ended:
                return
        if info is not None and callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        wraps = self.shape.tail in ("wrap", "level") and not self.shape.drop_last
        head_size = self.shape.row_items if wraps else 0
        cursor = Cursor(self.dataset, seed, self.items_per_seed, head_size)
        seed_cpu(seed)  # `iter` of the dataset may draw
        if resume_mode == _AFTER_EPOCH:
            cursor.begin_epoch_after(mark)
            mark, rows_to_skip = None, 0
        else:
            cursor.begin_pass(mark, self.label if worker == 0 and 0 in self.ranks else None)
        self.begin_state = cursor.begin_state
        rows = stream_rows(cursor, self.shape, cursor.make_mark, cursor.head, mark)
        needs_checksum = self.shape.world > 1
        for cells, end in itertools.islice(rows, rows_to_skip, None):
            mark, number, _ = end
            read = 0 if mark is None else mark["read"]
            batches = [
                self._make_batch(cells[rank], derive_seed(seed, read, number, rank))
                for rank in self.ranks
                if cells[rank] or self.needs_padding
            ]
            first_sample = checksum(cells[0][0]) if needs_checksum else None
            needs_checksum = False
            yield WorkerRow(worker, batches, end, first_sample)
            del batches

    def _make_batch(self, cell: list[Any], seed: int) -> Any:
        if not cell:
            return NoBatch()
        seed_cpu(seed)  # the next row's items are seeded anew when they are read
        return self.collate(cell if self.is_batched else cell[0])


class Cursor:
    """Reads the user's dataset and keeps the reading position.

    If the dataset, or the iterator that it returns, has ``state_dict`` and ``load_state_dict``, the
    cursor continues by these methods. Otherwise the cursor reads from the beginning and drops the
    items that were handed over before.
    """

    items: Iterator[Any]

    def __init__(self, dataset: Any, seed: int, items_per_seed: int, head_size: int) -> None:
        self.dataset = dataset
        self.items_read = 0
        self.seed = seed
        self.items_per_seed = items_per_seed
        self.head_size = head_size
        self.head: list[Any] = []  # the first items, to which the end of the stream may wrap around
        self.begin_state = _state_of(dataset)
        self._peeked_items: list[Any] = []

    def begin_pass(self, mark: Mark | None, label: str | None) -> None:
        """Continue at ``mark``, or begin the stream if it is None.

        The cursor reads the head before it continues. Reading it at the end would move a dataset
        that has just reached its end.
        """
        if mark is None or mark["state"] is None:
            self.items = iter(self.dataset)
            if mark is not None:
                self._skip_items(mark["read"], label)
            return
        if self.head_size:
            self.begin_epoch_after({**mark, "state": mark["begin"]})
            for _ in itertools.islice(self, self.head_size):
                pass
        self.items_read, self.begin_state = mark["read"], mark["begin"]
        self.items = self._load_state(mark["state"])

    def begin_epoch_after(self, mark: Mark | None) -> None:
        """Begin a new epoch of a stream whose last epoch ended at ``mark``.

        A dataset that resets itself at its end goes on from its state there. A dataset that does
        not would give an empty epoch, so ``iter`` is called once more, as a run without a restart
        calls it after the end.
        """
        if mark is None or mark["state"] is None:
            self.items = iter(self.dataset)
            return
        self.begin_state = mark["state"]
        self.items = self._load_state(mark["state"])
        try:
            self._peeked_items = [self._next_item()]
        except StopIteration:
            self.items = iter(self.dataset)

    def _load_state(self, state: Any) -> Iterator[Any]:
        if state is None:
            return iter(self.dataset)
        if is_stateful(self.dataset):
            self.dataset.load_state_dict(copy.deepcopy(state))
            return iter(self.dataset)
        items: Any = iter(self.dataset)
        items.load_state_dict(copy.deepcopy(state))
        return items

    def _skip_items(self, count: int, label: str | None) -> None:
        """Read ``count`` items and drop them; say so with ``label``, and show a bar on stderr."""
        if label is not None:
            warnings.warn(
                f"{label}: {type(self.dataset).__name__} cannot go to a position, so items from"
                " before the checkpoint are read again, and dropped.\nGive the dataset (or its"
                " iterator) `state_dict()`, called after each batch, and `load_state_dict(state)`,"
                " after which iter() continues there.",
                stacklevel=2,
            )
        items = itertools.islice(self, count)
        for _ in tqdm(items, f"{label}: skipping", count, disable=label is None):
            pass
        if self.items_read < count:
            raise RuntimeError(
                f"{label or 'stream'}: {type(self.dataset).__name__} ended after"
                f" {self.items_read} items while skipping the {count} items from before the"
                " checkpoint: this is not the same stream."
            )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = self._peeked_items.pop() if self._peeked_items else self._next_item()
        self.items_read += 1
        if len(self.head) < self.head_size:
            self.head.append(item)
        return item

    def _next_item(self) -> Any:
        if self.items_read % self.items_per_seed == 0:
            seed_cpu(derive_seed(self.seed, self.items_read))
        return next(self.items)

    def make_mark(self) -> Mark:
        """Return the current position.

        The state is a copy, because a dataset's `state_dict` may return its live state.
        """
        source = self.dataset if is_stateful(self.dataset) else self.items
        return {"read": self.items_read, "state": _state_of(source), "begin": self.begin_state}


def is_stateful(obj: Any) -> bool:
    """Whether the object can save its position and go back there."""
    return callable(getattr(obj, "state_dict", None)) and callable(
        getattr(obj, "load_state_dict", None)
    )


def _state_of(obj: Any) -> Any:
    return copy.deepcopy(obj.state_dict()) if is_stateful(obj) else None
