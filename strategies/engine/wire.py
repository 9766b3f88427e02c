"""fp32 values that travel in a narrower dtype: they are rounded once, and added up in fp32.

Nothing here needs memory. The bytes of n values hold them twice in a dtype of half the size: what is sent lies in one half of
the buffer, and what arrives lands in the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_APART = 4096  # this many values are converted by way of a copy; beyond, source and target do not overlap


def narrow(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``buffer`` [n] to ``dtype`` of half its itemsize, in place; returns the result [n], its first half."""
    n = buffer.numel()
    low = buffer.view(dtype)[:n]
    done = min(n, _APART)
    low[:done].copy_(buffer[:done].to(dtype))
    while done < n:  # values [done, 2 * done) land where [done / 2, done) were
        stop = min(2 * done, n)
        low[done:stop].copy_(buffer[done:stop])
        done = stop
    return low


def widen(buffer: Tensor, dtype: torch.dtype) -> None:
    """Undo :func:`narrow`, from values [n] of ``dtype`` in the second half of ``buffer`` [n]."""
    n = buffer.numel()
    high = buffer.view(dtype)[n:]
    done = 0
    while n - done > _APART:  # up to the middle of what is left, targets end before their sources begin
        stop = (n + done) // 2
        buffer[done:stop].copy_(high[done:stop])
        done = stop
    buffer[done:].copy_(high[done:].clone())


class RoundedSum:
    """A reduce-scatter of ``buffer`` [world_size * shard] in fp32, whose summands travel in ``dtype``.

    Every rank's shard is rounded, the own one too, so that a sum does not depend on who computes it. Sums are taken in rank
    order when all have arrived: they do not depend on timing.
    """

    def __init__(self, door: Any, buffer: Tensor, dtype: torch.dtype, label: int) -> None:
        self._total = buffer[: buffer.numel() // door.world_size]  # over what has been sent by then
        arriving = buffer.view(dtype)[buffer.numel() :]
        self._exchange = door.all_to_all(narrow(buffer, dtype), arriving, label)
        self._world_size = door.world_size

    def wait(self) -> Tensor:
        """See :meth:`~.collectives.Pending.wait`."""
        first, *others = self._exchange.wait().view(self._world_size, -1)
        self._total.copy_(first)
        for summand in others:
            self._total.add_(summand)
        return self._total
