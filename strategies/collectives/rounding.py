"""In-place rounding of fp32 values that travel in a 16-bit dtype, and the way back.

A value is rounded once, and sums are taken in fp32. The only memory beside the buffer is a scratch
of 4096 values, which the caller keeps. A buffer of n fp32 values has room for 2n 16-bit ones: the
values that are sent lie in its first half, and those that arrive land in the second.
"""

from __future__ import annotations

import torch
from torch import Tensor

# So many values are converted by way of a copy, because their source and target may overlap.
_COPIED_VALUES = 4096
ROOM = 2 * _COPIED_VALUES  # bytes of the scratch memory that the callers pass as ``room``


def narrow(buffer: Tensor, dtype: torch.dtype, room: Tensor) -> Tensor:
    """Round fp32 ``buffer`` [n] to a 16-bit ``dtype`` in place; return its first half, the result.

    The result is [n, ``dtype``]. ``room`` [:data:`ROOM`, uint8] is overwritten.
    """
    n = buffer.numel()
    low = buffer.view(dtype)[:n]
    done = min(n, _COPIED_VALUES)
    low[:done].copy_(room.view(dtype)[:done].copy_(buffer[:done]))
    # Values [done, 2 * done) land where [done / 2, done), already converted, were.
    while done < n:
        stop = min(2 * done, n)
        low[done:stop].copy_(buffer[done:stop])
        done = stop
    return low


def widen(buffer: Tensor, dtype: torch.dtype, room: Tensor) -> None:
    """Widen the second half of ``buffer`` [n, fp32], which is [n, ``dtype``], to all of it.

    ``room`` [:data:`ROOM`, uint8] is overwritten.
    """
    n = buffer.numel()
    high = buffer.view(dtype)[n:]
    done = 0
    # In each round the targets end where their sources begin: at the middle of the rest.
    while n - done > _COPIED_VALUES:
        stop = (n + done) // 2
        buffer[done:stop].copy_(high[done:stop])
        done = stop
    buffer[done:].copy_(room.view(dtype)[: n - done].copy_(high[done:]))
