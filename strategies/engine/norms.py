"""Sums of squares of gradients, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_RUN = 1 << 16


def squared_norms(parts: Sequence[Tensor]) -> Tensor:
    """The squared 2-norms [number of parts] of flat tensors of one device, in float64.

    One fp32 sum over a large shard would lose digits. On the CPU, where a sum in float64 makes a
    copy, norms of runs of 64 Ki elements are combined in float64.
    """
    if parts[0].device.type != "cpu":
        parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return torch.stack(norms).square()
    whole = [part.numel() // _RUN * _RUN for part in parts]
    rest = [part[stop:] for part, stop in zip(parts, whole, strict=True)]
    squares = torch.stack(torch._foreach_norm(rest)).double().square()
    for index, (part, stop) in enumerate(zip(parts, whole, strict=True)):
        if stop:
            runs = torch.linalg.vector_norm(part[:stop].view(-1, _RUN), dim=1)
            squares[index] += runs.double().square().sum()
    return squares
