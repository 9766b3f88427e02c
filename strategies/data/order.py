"""Which samples of an epoch each rank receives, as integers.

Words: an epoch's **order** is a sequence of items (sample indices, or whole batches of a custom
batch sampler). A **row** is one step: one batch on every rank. A **cell** is one rank's part of one
row. **start** is the number of items of the order that were handed over before. Every layout below
is a cut of ``order[start:]``, so a resumed epoch on any world size continues the same order. The
end, where fewer items are left than one row needs, has one of two layouts:

- wrapped: the row is filled from the head of the epoch (Accelerate's ``even_batches=True``), of a
  stream from the row itself;
- balanced: no item repeated or missed, cell sizes differ by at most one, and every rank has equally
  many batches whenever that is possible: when less than one item per rank is left, the last two
  rows are cut evenly. Impossible only for ``batch == 1`` or less than one item per rank in all;
  then the last ranks have one batch less.

Splitting one batch of ``world * b`` samples in ``world`` pieces and giving every rank its own batch
of ``b`` samples are the same layout, so one plan serves both sharding modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any


@dataclass(frozen=True)
class RowPlan:
    """The rows of one epoch, or of its rest after ``start`` items.

    Attributes:
        items: items in the epoch's order.
        batch: items per rank in a full row.
        world: number of ranks.
        wraps: an incomplete last row is wrapped, not balanced.
        drop_last: drop the incomplete last row (up to ``world * batch - 1`` items).
        start: items handed over before this plan begins.
    """

    items: int
    batch: int
    world: int
    wraps: bool = True
    drop_last: bool = False
    start: int = 0

    # cached: a loader asks for each batch, and batches can be tiny

    @cached_property
    def row_items(self) -> int:
        """The number of items in a full row."""
        return self.batch * self.world

    @cached_property
    def left_items(self) -> int:
        """The number of items after the last full row; 0 if these are dropped."""
        return 0 if self.drop_last else (self.items - self.start) % self.row_items

    @cached_property
    def rows(self) -> int:
        """The number of rows, which is the largest number of batches of any rank."""
        return (self.items - self.start) // self.row_items + (self.left_items > 0)

    def batches(self, rank: int) -> int:
        """Count the batches of one rank."""
        if self.left_items == 0:
            return self.rows
        lo, hi = self.bounds(self.rows - 1, rank)
        return self.rows - (hi <= lo)

    def batches_per_rank(self) -> list[int]:
        """Count the batches of every rank, ``[world]``."""
        return [self.batches(rank) for rank in range(self.world)]

    def bounds(self, row: int, rank: int) -> tuple[int, int]:
        """Compute the positions ``[lo, hi)`` of a cell; ``hi > items`` wraps to the head."""
        base = self.start + row * self.row_items
        first_tail_row = self.rows - self._tail_rows
        if row < first_tail_row or self.wraps:
            return base + rank * self.batch, base + (rank + 1) * self.batch
        tail_start = self.start + first_tail_row * self.row_items
        cell = (row - first_tail_row) * self.world + rank
        size, larger_cells = divmod(self.items - tail_start, self._tail_rows * self.world)
        lo = tail_start + cell * size + min(cell, larger_cells)
        return lo, lo + size + (cell < larger_cells)

    @cached_property
    def _tail_rows(self) -> int:
        """Count the rows of a balanced end that are not cut like full rows: 0, 1 or 2."""
        if self.left_items == 0:
            return 0
        has_two_rows = self.left_items < self.world and self.batch > 1
        return 2 if has_two_rows and self.rows > 1 else 1

    def items_after(self, rows: int) -> int:
        """Count the items of the order that are used after ``rows`` rows of this plan."""
        if rows <= 0:
            return self.start
        _, hi = self.bounds(min(rows, self.rows) - 1, self.world - 1)
        return min(hi, self.items)


def read_cell(order: Sequence[Any], plan: RowPlan, row: int, rank: int) -> list[Any]:
    """List the items of one cell.

    The end of ``order`` (a range, a numpy array or a list) wraps to its own first row, several
    times if it is shorter than a row.
    """
    lo, hi = plan.bounds(row, rank)
    items = _as_list(order[lo : min(hi, plan.items)])
    if hi > plan.items:
        head = _as_list(order[: plan.row_items])
        items += [head[(p - plan.items) % len(head)] for p in range(max(lo, plan.items), hi)]
    return items


def _as_list(items: Any) -> list[Any]:
    return items.tolist() if hasattr(items, "tolist") else list(items)


# Where a stream was read to: the number of items, and the dataset's own state or None.
Mark = tuple[int, Any]
STREAM_START: Mark = (0, None)

# Where to go on after a row of a stream: the mark to resume from, rows to drop after it, and
# whether the source has ended.
RowEnd = tuple[Mark, int, bool]


def stream_rows(
    source: Iterator[Any],
    shape: RowPlan,
    make_mark: Callable[[], Mark],
    begin: Mark = STREAM_START,
) -> Iterator[tuple[list[list[Any]], RowEnd]]:
    """Cut a stream of unknown length into rows with the same layouts as `RowPlan`.

    A row is the items of every rank, ``[world][items]``, and its end.

    A row is yielded only after the next row was read. So the source has ended, and has reset itself
    if it does, before the last row is yielded.

    Args:
        source: the items.
        shape: batch, world, wraps and drop_last; its ``items`` and ``start`` are not used.
        make_mark: called after the last item of a row was read and again at the end of the source;
            the row carries the result, so that a resume from a row's mark continues with the next
            row.
        begin: the mark at which ``source`` begins.
    """
    pending, mark = None, begin  # a row of items, and the mark after it
    while True:
        buffer = list(islice(source, shape.row_items))
        if len(buffer) < shape.row_items:
            break
        if pending is not None:
            yield _cut_rows(pending, shape)[0], (mark, 0, False)
            begin = mark
        pending, mark = buffer, make_mark()
    end = make_mark()
    if not buffer or shape.drop_last:
        if pending is not None:
            yield _cut_rows(pending, shape)[0], (end, 0, True)
        return
    if pending is not None and (shape.wraps or len(buffer) >= shape.world):
        yield _cut_rows(pending, shape)[0], (mark, 0, False)
        begin, pending = mark, None
    rows = _cut_rows((pending or []) + buffer, shape)
    # The two rows of a tail share their items, so no mark lies between the rows: a resume after the
    # first row begins at the mark before the tail and drops one row.
    for number, cells in enumerate(rows[:-1], 1):
        yield cells, (begin, number, False)
    yield rows[-1], (end, 0, True)


def _cut_rows(items: list[Any], shape: RowPlan) -> list[list[list[Any]]]:
    plan = RowPlan(len(items), shape.batch, shape.world, shape.wraps)
    return [
        [read_cell(items, plan, row, rank) for rank in range(plan.world)]
        for row in range(plan.rows)
    ]
