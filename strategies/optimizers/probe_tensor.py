"""Note in a trial whether an optimizer asks about a parameter for more than its elements."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# Functions whose results are no tensors and depend on more of a parameter than one element.
_QUESTIONS = set(
    "dim ndim ndimension numel nelement stride __len__ item tolist numpy equal allclose is_nonzero"
    " __bool__ __float__ __int__".split()
)


class ProbeParameter(nn.Parameter):
    """A parameter that notes questions about it, unless one of torch's own optimizers asks.

    Tensors of the same shape that torch computes from it note them, too. Code asks a question if it
    reads the dimensions, the size or an attribute that the user has set, or computes a tensor of
    another shape (a norm, a part). The answer may serve a rule that no trial reaches, such as one
    for a gradient that is too large.
    """

    is_questioned = False  # of all instances: whether a question was asked

    def __getattr__(self, name: str) -> Any:
        """Note that the optimizer reads an attribute of the user's, such as `_no_weight_decay`.

        Flat shards do not have it.

        Raises:
            AttributeError: always, as Python calls this for attributes that do not exist.
        """
        if not _is_asked_by_torch(sys._getframe(1)):
            ProbeParameter.is_questioned = True
        raise AttributeError(name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Compute the result, and note whether the call asks a question."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            shapes = [
                tuple(each.shape)
                for each in _tensors([*args, *kwargs.values()])
                if isinstance(each, cls)
            ]
            same_shape = all(tuple(each.shape) in shapes for each in _tensors([result]))
            if type(result) is Tensor and same_shape:
                result = result.as_subclass(cls)
            elif type(result) in (list, tuple) and same_shape:
                result = type(result)(
                    each.as_subclass(cls) if type(each) is Tensor else each for each in result
                )
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if _is_asked_by_torch(sys._getframe(1)):
            return result
        has_new_shape = not same_shape and not name.startswith("new_")
        is_one_size = name == "size" and isinstance(result, int)
        if has_new_shape or name in _QUESTIONS or is_one_size:
            cls.is_questioned = True
        return _Sizes(result) if isinstance(result, torch.Size) else result


class _Sizes(tuple):
    """A shape that notes when code reads a dimension of it.

    Code that passes it on as a whole (`torch.zeros(p.shape)`) asks no question.
    """

    def __len__(self) -> int:
        """Return the number of dimensions."""
        ProbeParameter.is_questioned = True
        return super().__len__()

    def __iter__(self) -> Iterator[int]:
        """Iterate over the dimensions."""
        ProbeParameter.is_questioned = True
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """Return one dimension, or a slice of them."""
        ProbeParameter.is_questioned = True
        return super().__getitem__(index)

    def numel(self) -> int:
        """Return the number of elements."""
        ProbeParameter.is_questioned = True
        return torch.Size(tuple(super().__iter__())).numel()


def _tensors(values: Any) -> list[Tensor]:
    inner = [
        each for value in values for each in (value if type(value) in (list, tuple) else [value])
    ]
    return [each for each in inner if isinstance(each, Tensor)]


def _is_asked_by_torch(frame: Any) -> bool:
    """Say whether one of torch's optimizers asks, up the stack from ``frame``.

    Its questions do not count: the values that it computes show what it needs. Frames of torch's
    other modules are skipped, as every optimizer asks through torch's functions.
    """
    while (module := frame.f_globals.get("__name__", "")).partition(".")[0] == "torch":
        if module.startswith("torch.optim."):
            return True
        frame = frame.f_back
    return False
