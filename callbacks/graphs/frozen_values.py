"""Python values that a step depends on, in a form that tells later whether they are still the
same.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Container, Mapping
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .source_lines import is_library

_CONSTANTS = (int, str, bytes, type(None), Enum, torch.dtype, torch.device)
_LONGEST = 64  # what is longer is data, not a setting: it is known by its identity and length
_LARGEST = 2000  # keys and values of a table, likewise
_MOST = 500  # objects that are looked into for one value
_DEEPEST = 30  # objects within objects
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_DEFAULT_GENERATOR = np.random.get_state.__self__  # type: ignore[attr-defined]


class _Same:
    """Equal to that of the same object, which it keeps alive: no other one gets its address."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Same and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


class Everything:
    """Holds all names."""

    def __contains__(self, name: object) -> bool:
        return True


def constant(value: Any) -> Any:
    """A number or the like with its type: ``True``, ``1`` and ``1.0`` differ, ``0.0`` and ``-0.0``
    too, and NaN is NaN.
    """
    return type(value), repr(value) if isinstance(value, float | complex) else value


def is_constant(value: Any) -> bool:
    """Whether :func:`constant` can tell it from others."""
    return isinstance(value, (*_CONSTANTS, float, complex))


def is_itself(value: Any, frozen: Any) -> bool:
    """Whether it cannot become something else, other than by assigning another object in its
    place.
    """
    return (
        is_constant(value)
        or type(frozen) is _Same
        or (isinstance(value, tuple) and all(map(is_constant, value)))
    )


def random_state(source: Any) -> Any:
    """Of a generator of numpy, or of the default one (`numpy.random`), to be compared by ``==``."""
    has_getter = hasattr(source, "get_state")
    return _flat(
        source.get_state(legacy=False)
        if has_getter
        else getattr(source, "bit_generator", source).state
    )


def _flat(state: Any) -> Any:
    if isinstance(state, dict):
        return [(name, _flat(value)) for name, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state


def address(tensor: Tensor) -> int:
    """Where the values lie; 0 if nowhere, or in several places."""
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.layout is not torch.strided or not tensor.numel() else tensor.data_ptr()


def freeze(value: Any, names: Container[str], seen: set[int] | None = None, depth: int = 0) -> Any:
    """What ``value`` is now, to be compared by ``==``.

    Constants are their values; tensors, modules and objects of libraries are themselves (values of
    tensors may change); containers, functions, classes and other objects are what they hold.

    Args:
        value: of an attribute or a global.
        names: attributes of objects that count.
        seen: addresses of what was looked into.
        depth: of ``value`` in what was looked into.
    """
    if is_constant(value):
        return constant(value)
    if isinstance(value, Tensor):
        return _Same(value), address(value), value.requires_grad
    # which everybody draws from
    if isinstance(value, _GENERATORS) and value is not _DEFAULT_GENERATOR:
        return _Same(value), random_state(value)
    if type(value).__module__ == "numpy" and getattr(value, "size", _LONGEST) < _LONGEST:
        return type(value), str(value.dtype), value.tobytes()
    seen = set() if seen is None else seen
    held = (
        None if id(value) in seen or len(seen) > _MOST or depth > _DEEPEST else _held(value, names)
    )
    if held is None:
        return _Same(value)
    seen.add(id(value))
    if len(held) > (
        _LONGEST if isinstance(value, list | tuple | deque | set | frozenset) else _LARGEST
    ):
        return _Same(value), len(held)
    return type(value), [freeze(each, names, seen, depth + 1) for each in held]


def _held(value: Any, names: Container[str]) -> list[Any] | None:
    """What an object consists of; None if it counts as a whole."""
    if isinstance(value, Mapping) and type(value).__getitem__ is dict.__getitem__:
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | deque):
        return list(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=hash)
    if isinstance(value, FunctionType):
        if is_opaque(value.__module__ or "") and not value.__closure__:
            return None
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [value.__code__, *(value.__defaults__ or ()), *cells]
    if isinstance(value, MethodType):
        return (
            [value.__func__]
            if isinstance(value.__self__, nn.Module)
            else [value.__func__, value.__self__]
        )
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, nn.Module) or is_opaque(
        (value if isinstance(value, type) else type(value)).__module__
    ):
        return None
    attributes = _attributes(value)
    if attributes is None:
        return None
    # looked into already, so that it counts as itself
    own = [value] if isinstance(value, type) else []
    return own + [
        part for name, each in attributes.items() if name in names for part in (name, each)
    ]


def settings_of(cls: type) -> dict[str, Any]:
    """Attributes of a class that are data, without what it inherits."""
    if is_opaque(cls.__module__):
        return {}
    return {name: value for name, value in vars(cls).items() if _is_data(value)}


def _is_data(value: Any) -> bool:
    return (
        is_constant(value)
        or isinstance(value, Tensor | list | tuple | dict | set | deque | type)
        or not is_opaque(type(value).__module__)
    )


def _attributes(value: Any) -> dict[str, Any] | None:
    cls = type(value)
    if isinstance(value, type):
        return {
            name: each
            for base in reversed(value.__mro__)
            for name, each in settings_of(base).items()
        }
    attributes = dict(getattr(value, "__dict__", {}))
    if hasattr(cls, "__slots__"):
        slots = (
            n
            for each in cls.__mro__
            for n, kind in vars(each).items()
            if isinstance(kind, MemberDescriptorType)
        )
        attributes |= {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return attributes if attributes or hasattr(value, "__dict__") else None


def is_opaque(module: str) -> bool:
    """Whether objects that a module of this name defines are not looked into."""
    return is_library(module) or (
        module.partition(".")[0] in sys.stdlib_module_names and module not in ("types", "argparse")
    )


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
