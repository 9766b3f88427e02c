"""``torch.FloatTensor`` and the other types of old, which make a second tensor of a parameter's
memory and ask no class.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

_UNSET, _TENSORTYPE = torch._C._set_default_tensor_type, type(torch.FloatTensor)


class _Metatype(type):
    """Of types that are equal to those of torch, and have what they have, but for their calls."""

    __module__, __qualname__ = "torch", "tensortype"  # by which torch.compile knows them
    of: Any  # torch's own
    ask: Callable[[tuple], None]  # about what a call was given; raises
    __name__ = property(lambda cls: cls.of.__name__)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        cls.ask((*args, *kwargs.values()))
        return cls.of(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.of, name)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.of)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(_own(other), cls.of)

    def __eq__(cls, other: object) -> bool:
        return cls.of is _own(other)

    def __hash__(cls) -> int:
        return hash(cls.of)

    def __repr__(cls) -> str:
        return repr(cls.of)


def _own(kind: Any) -> Any:
    return kind.of if isinstance(kind, _Metatype) else kind


def replace_types(ask: Callable[[type, tuple], None]) -> dict[int, tuple[Any, Any]]:
    """Let these types ``ask(type, arguments)`` when called; returns torch's id -> torch's, what is
    in its place now.
    """
    replaced = {}
    for kind in torch._tensor_classes:
        if "sparse" not in kind.__module__:
            name = f"{kind.__module__}.{kind.__name__}"  # by which `tensor.type(...)` knows it
            now = _Metatype(
                name, (), {"of": kind, "ask": classmethod(ask), "__module__": kind.__module__}
            )
            now.__qualname__ = kind.__name__
            setattr(sys.modules[kind.__module__], kind.__name__, now)
            replaced[id(kind)] = kind, now
    # Who has kept one of torch's own can pickle it: it is found by its name, where another one is.
    copyreg.pickle(
        _TENSORTYPE,
        lambda kind: (torch._utils._import_dotted_name, (f"{kind.__module__}.{kind.__name__}",)),
    )
    torch._C._set_default_tensor_type = wraps(_UNSET)(lambda kind: _UNSET(_own(kind)))
    return replaced
