"""Streams (`IterableDataset`): the cut of this rank's part, and the position after each batch.

The loader's workers read the user's dataset. Every batch travels to the main process together with
the reading position of its worker, so that only batches that were *handed over* move the position
that a checkpoint records. With several workers, the position is one mark per worker and the worker
whose turn it is.
"""

from __future__ import annotations

import copy
import io
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..support.random_states import derive_seed, scoped, seed_cpu
from .no_batch import NoBatch
from .order import STREAM_START, Mark, RowEnd, RowPlan, stream_rows

# The reading positions of all workers: by worker the end of its last row that was handed over, and
# the worker whose row comes next.
StreamPosition = tuple[dict[int, RowEnd], int]
BEGINNING: StreamPosition = ({}, 0)


class WorkerRow(NamedTuple):
    """The batches of one row as they come from a worker, with the position after them.

    The pinning thread looks into tuples (`torch.utils.data._utils.pin_memory`).
    """

    worker: int
    batches: list[Any]  # of the ranks that are asked for and have one
    end: RowEnd
    first_sample: int | None  # the checksum of the pass's first sample, with the worker's first row


def advance(position: StreamPosition, row: WorkerRow, workers: int) -> StreamPosition:
    """Return the position after ``row``, which came after ``position``."""
    marks, _ = position
    return {**marks, row.worker: row.end}, (row.worker + 1) % max(1, workers)


class StreamShard(IterableDataset):
    """Cuts the user's stream into rows and yields the collated cells of some ranks.

    The shard replaces the user's dataset in a loader with ``batch_size=None``. The values that
    change from pass to pass are in shared memory, because persistent workers keep their first copy
    of this object.

    Args:
        dataset: the user's dataset.
        shape: batch per rank, world, wraps and drop_last.
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
        # [epoch, whether the pass begins at the position, seed of the random numbers]
        self.control = torch.zeros(3, dtype=torch.int64, device="cpu").share_memory_()

    def begin_pass(self, epoch: int, position: StreamPosition, seed: int) -> None:
        """Make the next iteration continue at ``position``, with random numbers from ``seed``."""
        self.position = position
        self.control[0], self.control[1], self.control[2] = epoch, position != BEGINNING, seed

    def __iter__(self) -> Iterator[WorkerRow | None]:
        rows = self._iterate()
        if get_worker_info() is not None:
            return rows
        # Each row is seeded anew; the main process keeps its generators' states.
        return iter(scoped()(partial(next, rows, None)), None)

    def _iterate(self) -> Iterator[WorkerRow | None]:
        worker = info.id if (info := get_worker_info()) is not None else 0
        epoch, is_resumed, seed = self.control.tolist()
        seed = derive_seed(seed, worker)
        marks, turn = self.position if is_resumed else BEGINNING
        mark, rows_to_skip, has_ended = marks.get(worker, (STREAM_START, 0, False))
        if worker < turn:
            # `DataLoader` asks its workers in turn, from worker 0 on. With this, the first row is
            # that of the right one.
            yield None
        if has_ended:
            return
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        label = self.label if worker == 0 and 0 in self.ranks else None
        cursor = Cursor(self.dataset, mark, seed, self.items_per_seed, label)
        rows = stream_rows(cursor, self.shape, cursor.make_mark, mark)
        needs_checksum = self.shape.world > 1
        for cells, end in itertools.islice(rows, rows_to_skip, None):
            (read, _), number, _ = end
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
    """Reads the user's dataset from a mark on, and keeps the reading position.

    If the dataset, or the iterator that it returns, has ``state_dict`` and ``load_state_dict``, the
    cursor continues by these methods. Otherwise the cursor reads from the beginning and drops the
    items that were handed over before; with ``label`` it says so.
    """

    def __init__(
        self, dataset: Any, mark: Mark, seed: int, items_per_seed: int, label: str | None
    ) -> None:
        self.first, state = mark
        self.seed = seed
        self.items_per_seed = items_per_seed
        seed_cpu(seed)  # `iter` of the dataset may draw
        self.source = dataset if is_stateful(dataset) else iter(dataset)
        load_state(self.source, state)
        self.items = iter(self.source)
        self.items_read = 0 if state is None else self.first
        if self.items_read < self.first and label is not None:
            warnings.warn(
                f"{label}: {type(dataset).__name__} cannot go to a position, so items from"
                " before the checkpoint are read again, and dropped.\nGive the dataset (or its"
                " iterator) `state_dict()`, called after each batch, and `load_state_dict(state)`,"
                " after which iter() continues there.",
                stacklevel=2,
            )
        for _ in itertools.islice(self, self.first - self.items_read):
            pass

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if (self.items_read - self.first) % self.items_per_seed == 0:
            seed_cpu(derive_seed(self.seed, self.items_read))
        item = next(self.items)
        self.items_read += 1
        return item

    def make_mark(self) -> Mark:
        """Return the current position."""
        return self.items_read, state_of(self.source)


def is_stateful(obj: Any) -> bool:
    """Whether the object can save its position and go back there."""
    return callable(getattr(obj, "state_dict", None)) and callable(
        getattr(obj, "load_state_dict", None)
    )


def state_of(obj: Any) -> Any:
    """Copy the object's state, which may be its live one; None if it has none."""
    return copy.deepcopy(obj.state_dict()) if is_stateful(obj) else None


def load_state(obj: Any, state: Any) -> None:
    """Go back to a state of `state_of`, of which the object gets a copy."""
    if state is not None:
        obj.load_state_dict(copy.deepcopy(state))


def checksum(sample: Any) -> int | None:
    """Compute a checksum that equal samples of two processes share; None if it is not pickled."""
    file = io.BytesIO()
    try:
        torch.save(sample, file)
    except Exception:
        return None
    return zlib.crc32(file.getbuffer())
