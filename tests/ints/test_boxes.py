"""Boxes of flat ranges, against numpy: each element of the range once, and in order."""

from itertools import product
from math import prod

import numpy as np
import pytest

from lightning_zero3.strategies.state_dicts.boxes import cut_into_boxes, memory_order

SHAPES = [(), (1,), (7,), (4, 6), (1, 5), (5, 1), (3, 1, 4), (2, 3, 4), (2, 1, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_boxes_are_the_range(shape):
    numel = prod(shape)
    whole = np.arange(numel).reshape(shape)
    for start, stop in product(range(numel + 1), repeat=2):
        boxes = cut_into_boxes(shape, start, stop)
        covered, position = [], 0
        for box in boxes:
            part = whole[
                tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
            ]
            assert box.start == position and part.size == prod(box.sizes) > 0
            covered += np.ravel(part).tolist()
            position += part.size
        assert covered == list(range(start, stop))
        assert len(boxes) <= max(2 * len(shape) - 1, 1), "more boxes than a range needs at most"


def test_memory_order_is_the_one_of_the_strides():
    for order in [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 3, 2)]:
        base = np.empty([2, 3, 4, 5])
        # memory order `order` of a tensor with other dimensions
        moved = base.transpose([order.index(k) for k in range(4)])
        assert memory_order(moved.strides) == order
