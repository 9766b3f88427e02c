"""Freezes Python values that a step depends on, to find out later whether they have changed."""

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

from ...strategies.engine import ShardedParameter
from .source_lines import is_library

_CONSTANTS = (int, str, bytes, type(None), Enum, torch.dtype, torch.device)
# Items of a sequence or set. A longer one is data, not a setting: its identity and length count.
_LONGEST = 64
_LARGEST = 2000  # keys and values of a table, likewise
_MOST = 500  # objects that are looked into for one value
_DEEPEST = 30  # depth of objects within objects
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_DEFAULT_GENERATOR = np.random.get_state.__self__  # type: ignore[attr-defined]


class _Same:
    """Equals another `_Same` of the same object.

    It keeps the object alive, so that no other object gets the same address.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Same and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


class Everything:
    """A container of all names."""

    def __contains__(self, name: object) -> bool:
        return True


def constant(value: Any) -> Any:
    """Return a number or other constant with its type, to be compared by ``==``.

    ``True``, ``1`` and ``1.0`` differ, ``0.0`` and ``-0.0`` too, and NaN equals NaN.
    """
    return type(value), repr(value) if isinstance(value, float | complex) else value


def is_constant(value: Any) -> bool:
    """Return whether :func:`constant` distinguishes ``value`` from other values."""
    return isinstance(value, (*_CONSTANTS, float, complex))


def is_itself(value: Any, frozen: Any) -> bool:
    """Return whether ``value``, once frozen as ``frozen``, can only change by a new assignment."""
    return (
        is_constant(value)
        or type(frozen) is _Same
        or (isinstance(value, tuple) and all(map(is_constant, value)))
    )


def random_state(source: Any) -> Any:
    """Return the state of a numpy generator, or of `numpy.random`, to be compared by ``==``."""
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
    """Return the address of the values; 0 for tensors that are empty, not strided or sharded."""
    with torch._C.DisableTorchFunctionSubclass():
        has_none = tensor.layout is not torch.strided or not tensor.numel()
        return 0 if has_none or isinstance(tensor, ShardedParameter) else tensor.data_ptr()


def freeze(value: Any, names: Container[str], seen: set[int] | None = None, depth: int = 0) -> Any:
    """Return the present state of ``value``, to be compared by ``==``.

    The state of a constant is its value. The state of a tensor, a module or an object of a library
    is its identity (of a tensor also its address and ``requires_grad``; its values may change). The
    state of a container, a function, a class or any other object is that of its contents.

    Args:
        value: the value of an attribute or a global.
        names: names of the attributes of objects that count.
        seen: ids of the objects that were looked into.
        depth: how deep in these objects ``value`` lies.
    """
    if is_constant(value):
        return constant(value)
    if isinstance(value, Tensor):
        return _Same(value), address(value), value.requires_grad
    # All code draws from the default generator, so its state does not count.
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
    """Return the contents of an object; None if its identity counts."""
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
    # A class is marked as looked into by now, so in its own contents its identity counts.
    own = [value] if isinstance(value, type) else []
    return own + [
        part for name, each in attributes.items() if name in names for part in (name, each)
    ]


def settings_of(cls: type) -> dict[str, Any]:
    """Return the attributes of a class that are data, without inherited ones."""
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
    """Return whether only the identity counts of objects that the module ``module`` defines."""
    return is_library(module) or (
        module.partition(".")[0] in sys.stdlib_module_names and module not in ("types", "argparse")
    )


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
