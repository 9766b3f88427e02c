"""Find the boxes of an N-d tensor that a range of its flat elements covers. Integers only.

A rank owns elements ``[start, stop)`` of a parameter in memory order. Checkpoints describe parts of
tensors as boxes (an offset and a size in every dimension)::

    . . . . x x      rows 0 to 3 of a (4, 6) tensor, elements 4 to 20:
    x x x x x x      the tail of row 0, rows 1 and 2, the head of row 3
    x x x x x x
    x x . . . .

The elements of each box are a range of the flat elements themselves, so a box is a view of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """Part of a tensor that is contiguous in memory.

    Attributes:
        offsets: first index in each dimension.
        sizes: extent in each dimension.
        start: first element of the box, counted from the start of the range that was cut.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def cut_into_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut elements ``[start, stop)`` of a row-major tensor of ``shape`` into boxes, in order."""
    return _cut_rows(tuple(shape), start, stop, 0)


def _cut_rows(shape: tuple[int, ...], start: int, stop: int, position: int) -> list[Box]:
    """Cut ``[start, stop)`` into boxes; ``position`` is where ``start`` lies in the whole range."""
    if start >= stop:
        return []
    if len(shape) == 0:
        return [Box((), (), position)]
    rest = shape[1:]
    row = prod(rest)
    first, last = start // row, (stop - 1) // row
    is_head_complete, is_tail_complete = start % row == 0, stop % row == 0
    if first == last and not (is_head_complete and is_tail_complete):
        inside = _cut_rows(rest, start - first * row, stop - first * row, position)
        return _prepend_index(first, inside)
    # the rows [low, high) are complete
    low, high = first + (not is_head_complete), last + is_tail_complete
    head, middle, tail = [], [], []
    if not is_head_complete:
        head = _prepend_index(first, _cut_rows(rest, start % row, row, position))
    if low < high:
        middle = [Box((low, *(0 for _ in rest)), (high - low, *rest), position + low * row - start)]
    if not is_tail_complete:
        inside = _cut_rows(rest, 0, stop % row, position + last * row - start)
        tail = _prepend_index(last, inside)
    return head + middle + tail


def _prepend_index(index: int, boxes: list[Box]) -> list[Box]:
    return [Box((index, *box.offsets), (1, *box.sizes), box.start) for box in boxes]


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """Order the dimensions of a dense tensor from the slowest to the fastest in memory."""
    return tuple(sorted(range(len(stride)), key=lambda dim: -stride[dim]))
