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
    shape = (1, *shape)
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    boxes, at = [], start
    while at < stop:
        # as many dimensions as begin here and end before `stop` are whole; of the one before them
        # the box has as much as there is
        dim = len(shape) - 1
        while dim and at % strides[dim - 1] == 0 and at + strides[dim - 1] <= stop:
            dim -= 1
        index = [at // stride % size for stride, size in zip(strides, shape, strict=True)]
        extent = min((stop - at) // strides[dim], shape[dim] - index[dim])
        sizes = (*[1] * dim, extent, *shape[dim + 1 :])
        boxes.append(Box(tuple(index[1:]), sizes[1:], at - start))
        at += extent * strides[dim]
    return boxes


def memory_order(stride: Sequence[int]) -> tuple[int, ...]:
    """Order the dimensions of a dense tensor from the slowest to the fastest in memory."""
    return tuple(sorted(range(len(stride)), key=lambda dim: -stride[dim]))
