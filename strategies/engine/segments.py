"""Elements of a flat tensor that an optimizer sees as one parameter: all of them, until some have
no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .flat_gradient import FlatGradient


@dataclass
class Segment:
    """Elements ``[start, stop)`` of a flat group, as the optimizer's parameter."""

    start: int
    stop: int
    parameter: nn.Parameter = field(repr=False)
    # the engine has shown a gradient of it, which the user may have cleared since
    shown: bool = False

    def view(self, flat: Tensor) -> Tensor:
        """The segment's range of another flat tensor of the group."""
        return flat[self.start : self.stop]

    def show(self, gradients: Tensor) -> None:
        """Let the optimizer see its range of the group's ``gradients``."""
        shown = Tensor.as_subclass(gradients[self.start : self.stop], FlatGradient)
        shown.whose = self.parameter.whose
        with torch._C.DisableTorchFunctionSubclass():  # else it would be a user's
            self.parameter.grad, self.shown = shown, True

    def has_shape_of(self, value: Tensor) -> bool:
        """Whether ``value`` has one number for each of its elements."""
        return value.dim() == 1 and value.numel() == self.stop - self.start

    def part(self, value: Any, low: int, high: int) -> Any:
        """Of the optimizer's state ``value`` of it, what elements [low, high) get when it is
        split.
        """
        if not isinstance(value, Tensor):
            return value
        with torch._C.DisableTorchFunctionSubclass():
            return value[low:high] if self.has_shape_of(value) else value.clone()
