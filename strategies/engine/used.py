"""What a parameter is while its unit is in use: an ordinary one, except that nothing is written past its version counter."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .resting import ResidencyError, describe

set_data = Tensor.data.__set__  # torch's own: the parameter gets other memory


class _InUse:
    """Makes ``parameter.data`` an alias that counts versions, as ``detach()`` does.

    Torch's own hides writes: ``parameter.data.clamp_()`` leaves the version as it was, so nobody could tell that the shards
    have to follow. Costs nothing but torch's look at the class of each operand.
    """

    _cls: type[nn.Parameter]  # the user's

    @property
    def data(self) -> Tensor:
        return Tensor.detach(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ResidencyError(
                f"`.data` of parameter {describe(self)} was set to a tensor of shape {tuple(value.shape)} and {value.dtype}. "
                "While the parameter is sharded its shape and dtype stay as they are."
            )
        with torch.no_grad():
            self.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copied = nn.Parameter(Tensor.detach(self).clone(memory_format=torch.preserve_format), self.requires_grad)
            copied.__class__ = self._cls
            memo[id(self)] = copied
        return memo[id(self)]


@cache
def class_while_used(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    """The subclass of ``cls`` that a parameter has while it is in use."""
    return type(cls.__name__, (_InUse, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_cls": cls})
