"""Tensors of one element that need no gradient, at rest.

Where torch wants a number (``torch.add(x, y, alpha=weight)``, ``x.roll(weight)``) it takes such a
tensor for one in C++, and asks no class. At rest they have no elements in their memory, so that
torch refuses them, by an error that names their class.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .apart import apart
from .functions import instances
from .resting import Absent, set_data


class Number(Absent):
    """One that rests: it has its one element while it is asked."""

    _layout: tuple[Any, Any]  # its size and strides

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Answer, gather or raise."""
        shown = [
            number
            for number in instances((args, kwargs), Number)
            if show(number) or func in _FREEZING
        ]
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        finally:
            for number in shown:
                hide(number)
        # torch asks, and then reads the number itself
        if func is Tensor.__index__ and isinstance(args[0], Number):
            _lend(args[0], result)
        return result


_FREEZING = (Tensor.requires_grad_, Tensor.requires_grad.__set__)


def class_at_rest(cls: type[Tensor], tensor: Tensor, told: str) -> type[Tensor]:
    """The subclass of ``cls`` that ``tensor``, of one element, has at rest; ``told`` says which it
    is.
    """
    name = f"{told}, which is sharded over the ranks: give its `.item()`"
    return type(
        name,
        (Number, cls),
        {"__module__": cls.__module__, "_layout": (tensor.size(), tensor.stride())},
    )


def _lend(number: Tensor, value: int) -> None:
    """Give it memory of its own until it is asked, used or changed."""
    with torch._C.DisableTorchFunctionSubclass(), apart():
        if not number.numel():
            number.place = number.data
            set_data(number, torch.tensor(value, dtype=number.dtype, device=number.device))


def take_back(number: Tensor) -> None:
    """Its value is another one, or it is to be hidden or shown: it has no memory of its own any
    more.
    """
    if (place := number.__dict__.pop("place", None)) is not None:
        with torch._C.DisableTorchFunctionSubclass():
            set_data(number, place)


def hide(number: Tensor) -> None:
    """From now on it is no number for torch, if it could be one."""
    if isinstance(number, Number):  # else its unit has come into use
        with torch._C.DisableTorchFunctionSubclass(), apart():
            take_back(number)
            if not number.requires_grad:
                set_data(number, number.data.as_strided((0,), (1,)))


def show(number: Tensor) -> bool:
    """The contrary; whether it was hidden."""
    with torch._C.DisableTorchFunctionSubclass(), apart():
        take_back(number)
        hidden = isinstance(number, Number) and not number.numel()
        if hidden:
            set_data(number, number.data.as_strided(*number._layout))
    return hidden
