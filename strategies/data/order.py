"""Which samples of an epoch each rank receives, as integers.

Words: an epoch's **order** is a sequence of items (sample indices, or whole batches of a custom
batch sampler). A **row** is one step: one batch on every rank. A **cell** is one rank's part of one
row. **start** is the number of items of the order that were handed over before. Every layout below
is a cut of ``order[start:]``, so a resumed epoch on any world size continues the same order. The
**tail** is the layout of the end, where fewer items are left than one row needs:

========== =====================================================================================
wrap       the row is filled from the head of the epoch (Accelerate's ``even_batches=True``)
uneven     full cells first, later ranks get less or nothing (``even_batches=False``); ranks may
           have different numbers of batches
level      equal, smaller cells; at most ``world - 1`` items are repeated (Accelerate's dispatcher)
balance    no item repeated or missed, cell sizes differ by at most one, and every rank has equally
           many batches whenever that is possible: when less than one item per rank is left, the
           last two rows are cut evenly. Impossible only for ``batch == 1`` or less than one item
           per rank in all; then the last ranks have one batch less.
========== =====================================================================================

Splitting one batch of ``world * b`` samples in ``world`` pieces and giving every rank its own batch
of ``b`` samples are the same layout, so one plan serves both sharding modes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal

Tail = Literal["wrap", "uneven", "level", "balance"]
TAILS: tuple[Tail, ...] = ("wrap", "uneven", "level", "balance")


@dataclass(frozen=True)
class RowPlan:
    """The rows of one epoch, or of its rest after ``start`` items.

    Attributes:
        items: items in the epoch's order.
        batch: items per rank in a full row.
        world: number of ranks.
        tail: the layout of an incomplete last row.
        drop_last: drop the incomplete last row (up to ``world * batch - 1`` items).
        start: items handed over before this plan begins.
    """

    items: int
    batch: int
    world: int
    tail: Tail = "wrap"
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
        if row < first_tail_row or self.tail == "wrap":
            return base + rank * self.batch, base + (rank + 1) * self.batch
        if self.tail == "uneven":
            lo = min(base + rank * self.batch, self.items)
            return lo, min(lo + self.batch, self.items)
        if self.tail == "level":
            piece = -(-self.left_items // self.world)
            return base + rank * piece, base + (rank + 1) * piece
        tail_start = self.start + first_tail_row * self.row_items
        cell = (row - first_tail_row) * self.world + rank
        size, larger_cells = divmod(self.items - tail_start, self._tail_rows * self.world)
        lo = tail_start + cell * size + min(cell, larger_cells)
        return lo, lo + size + (cell < larger_cells)

    @cached_property
    def _tail_rows(self) -> int:
        """Count the rows that are not cut like full rows: 0, 1 or 2."""
        if self.left_items == 0:
            return 0
        has_two_rows = self.tail == "balance" and self.left_items < self.world and self.batch > 1
        return 2 if has_two_rows and self.rows > 1 else 1

    def items_after(self, rows: int) -> int:
        """Count the items of the order that are used after ``rows`` rows of this plan."""
        if rows <= 0:
            return self.start
        _, hi = self.bounds(min(rows, self.rows) - 1, self.world - 1)
        return min(hi, self.items)


def read_cell(
    order: Sequence[Any],
    plan: RowPlan,
    row: int,
    rank: int,
    head: Sequence[Any] | None = None,
) -> list[Any]:
    """List the items of one cell.

    Args:
        order: a range, a numpy array or a list.
        plan: cuts ``order``.
        row: number of the row in ``plan``.
        rank: the rank whose cell it is.
        head: the items to which the end of the order wraps, several times if the epoch is shorter
            than a row; by default its own first row.
    """
    lo, hi = plan.bounds(row, rank)
    items = _as_list(order[lo : min(hi, plan.items)])
    if hi > plan.items:
        head = _as_list(order[: plan.row_items]) if head is None else head
        items += [head[(p - plan.items) % len(head)] for p in range(max(lo, plan.items), hi)]
    return items


def _as_list(items: Any) -> list[Any]:
    return items.tolist() if hasattr(items, "tolist") else list(items)


# {"read": items read, "state": the dataset's own state or None, "begin": its state at the start of
# the epoch}
Mark = dict[str, Any]

# Where to go on after a row of a stream: the mark to resume from (None: the beginning of the
# stream), rows to drop after it, and whether the source has ended.
RowEnd = tuple[Mark | None, int, bool]


def stream_rows(
    source: Iterator[Any],
    shape: RowPlan,
    make_mark: Callable[[], Mark],
    head: list[Any] | None = None,
    begin: Mark | None = None,
) -> Iterator[tuple[list[list[Any]], RowEnd]]:
    """Cut a stream of unknown length into rows with the same layouts as `RowPlan`.

    A row is the items of every rank, ``[world][items]``, and its end.

    A row is yielded only after the next row was read. So the source has ended, and has reset itself
    if it does, before the last row is yielded.

    Args:
        source: the items.
        shape: batch, world, tail and drop_last; its ``items`` and ``start`` are not used.
        make_mark: called after the last item of a row was read and again at the end of the source;
            the row carries the result, so that a resume from a row's mark continues with the next
            row.
        head: at the end of ``source`` the first row of the whole stream, if ``source`` does not
            begin there.
        begin: the mark at which ``source`` begins.
    """
    pending, mark = None, None  # a row of items, and the mark after it
    while True:
        buffer = list(islice(source, shape.row_items))
        if head is None:
            head = buffer
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
    if pending is not None and not (shape.tail == "balance" and len(buffer) < shape.world):
        yield _cut_rows(pending, shape)[0], (mark, 0, False)
        begin, pending = mark, None
    rows = _cut_rows((pending or []) + buffer, shape, head)
    # The two rows of a tail share their items, so no mark lies between the rows: a resume after the
    # first row begins at the mark before the tail and drops one row.
    for number, cells in enumerate(rows[:-1], 1):
        yield cells, (begin, number, False)
    yield rows[-1], (end, 0, True)


def _cut_rows(
    items: list[Any], shape: RowPlan, head: list[Any] | None = None
) -> list[list[list[Any]]]:
    plan = RowPlan(len(items), shape.batch, shape.world, shape.tail)
    return [
        [read_cell(items, plan, row, rank, head) for rank in range(plan.world)]
        for row in range(plan.rows)
    ]
