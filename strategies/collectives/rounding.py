"""fp32 values that travel in a narrower dtype: they are rounded once, and added up in fp32.

Nothing here needs memory but for a run of 4096 values, which whoever calls has for good. The bytes
of n values hold them twice in a dtype of half the size: what is sent lies in one half of the
buffer, and what arrives lands in the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

# this many values are converted by way of a copy; beyond, source and target do not overlap
_APART = 4096
ROOM = 2 * _APART  # bytes of it


def narrow(buffer: Tensor, dtype: torch.dtype, room: Tensor) -> Tensor:
    """Round fp32 ``buffer`` [n] to ``dtype`` of 16 bits, in place; returns the result [n], its
    first half.

    ``room`` [:data:`ROOM`, bytes] is written to.
    """
    n = buffer.numel()
    low = buffer.view(dtype)[:n]
    done = min(n, _APART)
    low[:done].copy_(room.view(dtype)[:done].copy_(buffer[:done]))
    while done < n:  # values [done, 2 * done) land where [done / 2, done) were
        stop = min(2 * done, n)
        low[done:stop].copy_(buffer[done:stop])
        done = stop
    return low


def widen(buffer: Tensor, dtype: torch.dtype, room: Tensor) -> None:
    """Undo :func:`narrow`, from values [n] of ``dtype`` in the second half of ``buffer`` [n];
    ``room`` as there.
    """
    n = buffer.numel()
    high = buffer.view(dtype)[n:]
    done = 0
    # up to the middle of what is left, targets end before their sources begin
    while n - done > _APART:
        stop = (n + done) // 2
        buffer[done:stop].copy_(high[done:stop])
        done = stop
    buffer[done:].copy_(room.view(dtype)[: n - done].copy_(high[done:]))
