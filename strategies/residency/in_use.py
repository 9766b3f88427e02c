"""What a parameter is while its unit is in use: an ordinary ``nn.Parameter`` whose changes and
gradients are known.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .home import ResidencyError, about, describe
from .resting import gradient_of, keep_engine_last, refusal, set_gradient_of


class _InUse:
    """Makes ``parameter.grad`` the whole gradient, and ``parameter.data`` an alias that counts
    versions, as ``detach()`` does.

    Torch's own hides writes (``parameter.data.clamp_()``): nobody could tell that the shards have
    to follow.
    """

    _cls: type[nn.Parameter]  # the user's
    grad = property(gradient_of, set_gradient_of, lambda self: set_gradient_of(self, None))

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        handle = Tensor.register_post_accumulate_grad_hook(self, hook)
        keep_engine_last(self)
        return handle

    @property
    def data(self) -> Tensor:
        about(self).aliased = True
        return Tensor.detach(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise refused_data(self, value)
        # not what `module.to(...)` left as it was
        if value.data_ptr() != self.data_ptr() or value.stride() != self.stride():
            with torch.no_grad():
                # it may be a view of the same memory (`parameter.data.t()`)
                self.copy_(value.clone())

    def set_(self, source: Any = None, *layout: Any) -> Tensor:
        if not isinstance(source, Tensor) or layout:
            raise refusal("set_", self)
        self.data = source
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = nn.Parameter(
            Tensor.detach(self).clone(memory_format=torch.preserve_format), self.requires_grad
        )
        copied.__class__ = self._cls
        return copied


def refused_data(parameter: Tensor, value: Tensor) -> ResidencyError:
    """What to raise when ``value`` cannot be the data of ``parameter``."""
    return ResidencyError(
        f"`.data` of parameter {describe(parameter)} was set to a tensor of shape"
        f" {tuple(value.shape)} and {value.dtype} on {value.device}. While the parameter is sharded"
        " its shape, dtype and device stay as they are: change them before, in `__init__` or"
        " `configure_model`."
    )


@cache
def class_while_used(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    """The subclass of ``cls`` that a parameter has while it is in use."""
    return type(
        cls.__name__,
        (_InUse, cls),
        {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "_cls": cls},
    )
