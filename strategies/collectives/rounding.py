"""In-place rounding of fp32 values that travel in a 16-bit dtype.

A value is rounded once, and sums are taken in fp32. A buffer of n fp32 values has room for 2n
16-bit ones: the values that are sent lie in its first half, and those that arrive land in the
second. They are converted a block at a time, by way of a scratch that the caller keeps, because a
block's source and target may overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 1 << 20  # values
ROOM = 2 * _BLOCK  # bytes of the scratch memory that the callers pass as ``room``


def narrow(buffer: Tensor, dtype: torch.dtype, room: Tensor) -> Tensor:
    """Round fp32 ``buffer`` [n] to a 16-bit ``dtype`` in place; return its first half, the result.

    The result is [n, ``dtype``]. ``room`` [:data:`ROOM`, uint8] is overwritten.
    """
    low = buffer.view(dtype)[: buffer.numel()]
    block = room.view(dtype)
    for source, target in zip(buffer.split(_BLOCK), low.split(_BLOCK), strict=True):
        target.copy_(block[: len(source)].copy_(source))
    return low
