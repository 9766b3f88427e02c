"""Which boxes of an N-d tensor a range of its flat elements covers. Integers only.

A rank owns elements ``[start, stop)`` of a parameter in memory order. Checkpoints describe parts of
tensors as boxes (an offset and a size in every dimension)::

    . . . . x x      rows 0 to 3 of a (4, 6) tensor, elements 4 to 20:
    x x x x x x      the tail of row 0, rows 1 and 2, the head of row 3
    x x x x x x
    x x . . . .

Each box is a range of the flat elements itself, so it is a view of them.
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
        start: its first element, counted from the start of the range that was cut.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def cut_into_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Boxes of a row-major tensor of ``shape`` that together are its elements ``[start, stop)``, in
    order.
    """
    shape = tuple(shape)
    return _cut(shape, start, stop, 0)


def _cut(shape: tuple[int, ...], start: int, stop: int, done: int) -> list[Box]:
    if start >= stop:
        return []
    if len(shape) == 0:
        return [Box((), (), done)]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    head_is_whole, tail_is_whole = start % row == 0, stop % row == 0
    if first == last and not (head_is_whole and tail_is_whole):
        return _below(first, _cut(shape[1:], start - first * row, stop - first * row, done))
    low, high = first + (not head_is_whole), last + tail_is_whole  # the rows [low, high) are whole
    head = [] if head_is_whole else _below(first, _cut(shape[1:], start % row, row, done))
    middle = []
    if low < high:
        rest = shape[1:]
        middle = [Box((low, *(0 for _ in rest)), (high - low, *rest), done + low * row - start)]
    tail = (
        []
        if tail_is_whole
        else _below(last, _cut(shape[1:], 0, stop % row, done + last * row - start))
    )
    return head + middle + tail


def _below(index: int, boxes: list[Box]) -> list[Box]:
    return [Box((index, *box.offsets), (1, *box.sizes), box.start) for box in boxes]


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """Dimensions of a dense tensor from the slowest to the fastest in memory."""
    return tuple(sorted(range(len(stride)), key=lambda dim: -stride[dim]))
