"""What an optimizer asks about a parameter beyond its elements, noted in a trial."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Their results, which are not tensors, depend on more of a parameter than one element.
_QUESTIONS = {"dim", "ndim", "ndimension", "numel", "nelement", "stride", "__len__"}
_QUESTIONS |= {
    "item",
    "tolist",
    "numpy",
    "equal",
    "allclose",
    "is_nonzero",
    "__bool__",
    "__float__",
    "__int__",
}


class Asked(nn.Parameter):
    """A parameter that notes questions by code that is not torch's optimizers'; so does what is
    made of it element by element.

    A question is for its dimensions, how large it is or an attribute of the user's own, or takes a
    tensor of another shape from it (a norm, a part). What the answer is for may be the rule of a
    moment that no trial has, such as a gradient that is too large.
    """

    asked = False

    def __getattr__(self, name: str) -> Any:
        """What users put on their parameters, the optimizer looks for (`_no_weight_decay`): flat
        shards have none of it.
        """
        if not _by_torch(sys._getframe(1)):
            Asked.asked = True
        raise AttributeError(name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Compute, and note."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            shapes = [
                tuple(each.shape)
                for each in _tensors([*args, *kwargs.values()])
                if isinstance(each, cls)
            ]
            alike = [tuple(each.shape) in shapes for each in _tensors([result])]
            if type(result) is Tensor and all(alike):
                result = result.as_subclass(cls)
            elif type(result) in (list, tuple) and all(alike):
                result = type(result)(
                    each.as_subclass(cls) if type(each) is Tensor else each for each in result
                )
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        taken = not all(alike) and not name.startswith("new_")
        if (
            taken or name in _QUESTIONS or (name == "size" and isinstance(result, int))
        ) and not _by_torch(sys._getframe(1)):
            cls.asked = True
        return (
            _Sizes(result)
            if isinstance(result, torch.Size) and not _by_torch(sys._getframe(1))
            else result
        )


class _Sizes(tuple):
    """A shape that notes that it is looked into; handed on as a whole (`torch.zeros(p.shape)`) it
    says nothing.
    """

    def __len__(self) -> int:
        """How many dimensions."""
        Asked.asked = True
        return super().__len__()

    def __iter__(self) -> Iterator[int]:
        """All dimensions."""
        Asked.asked = True
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """One dimension, or some."""
        Asked.asked = True
        return super().__getitem__(index)

    def numel(self) -> int:
        """How many elements."""
        Asked.asked = True
        return torch.Size(tuple(super().__iter__())).numel()


def _tensors(values: Any) -> list[Tensor]:
    inner = [
        each for value in values for each in (value if type(value) in (list, tuple) else [value])
    ]
    return [each for each in inner if isinstance(each, Tensor)]


def _by_torch(frame: Any) -> bool:
    """Whether an optimizer of torch asks: what it needs is seen in its numbers. Others ask through
    torch's functions.
    """
    while (module := frame.f_globals.get("__name__", "")).partition(".")[0] == "torch":
        if module.startswith("torch.optim."):
            return True
        frame = frame.f_back
    return False
