"""Whether a `zero_grad` is who asks for a gradient."""

from __future__ import annotations

import sys
from inspect import unwrap
from types import FrameType

from torch import nn
from torch.optim import Optimizer

_ZERO_GRAD = {nn.Module.zero_grad.__code__, unwrap(Optimizer.zero_grad).__code__}


def clearing() -> bool | None:
    """Whether a `zero_grad`, which looks at each gradient before it clears it, is who asks: its
    ``set_to_none``, else None.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in _ZERO_GRAD:
        frame = frame.f_back
    return None if frame is None else bool(frame.f_locals["set_to_none"])
