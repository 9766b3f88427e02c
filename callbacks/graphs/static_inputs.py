"""What batches and outputs consist of, and the fixed memory that a graph reads its inputs from."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_CONSTANTS = (int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)


class NotCapturable(Exception):
    """Some inputs, or a module, cannot be captured."""


def is_constant(value: Any) -> bool:
    """Return whether :func:`constant` distinguishes ``value`` from other values."""
    return isinstance(value, _CONSTANTS)


def constant(value: Any) -> Any:
    """Return a number or other constant with its type, to be compared by ``==``.

    ``True``, ``1`` and ``1.0`` differ, ``0.0`` and ``-0.0`` too, and NaN equals NaN.
    """
    return type(value), repr(value) if isinstance(value, float | complex) else value


def leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the types, tensors and constants that ``value`` consists of, each with its name.

    Args:
        value: a batch or an output, or a part of one.
        where: the name of ``value``.

    Raises:
        NotCapturable: an object is neither a dense tensor, nor a constant, nor a known container
            of these.
    """
    is_dense = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if is_dense or is_constant(value):
        yield where, value
        return
    if isinstance(value, PackedSequence):
        # Recurrent layers read `batch_sizes` on the host: a graph would keep the values.
        parts = {".data": value.data, ".batch_sizes": value.batch_sizes.tolist()}
    elif isinstance(value, Mapping):
        parts = {f"[{key!r}]": item for key, item in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"[{k}]": item for k, item in enumerate(value)}
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {f".{f.name}": getattr(value, f.name) for f in fields(value)}
    else:
        raise NotCapturable(
            f"{where} is a {'sparse ' if isinstance(value, Tensor) else ''}"
            f"{type(value).__module__}.{type(value).__qualname__}."
            " What goes into a graph and comes out are dense tensors and constants in lists,"
            " tuples, dicts and dataclasses."
        )
    yield f"the type of {where}", type(value)
    for name, part in parts.items():
        yield from leaves(part, where + name)


def signature(value: Any, where: str = "batch") -> Hashable:
    """Return a key that is equal for batches which one graph can take; see :func:`leaves`."""
    return tuple((name, _kind(leaf)) for name, leaf in leaves(value, where))


def _kind(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return leaf if isinstance(leaf, type) else constant(leaf)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a batch or an output, in a fixed order."""
    found: list[Tensor] = []
    apply_to_collection(value, Tensor, found.append)
    return found


class StaticInputs:
    """A copy of a batch at fixed addresses.

    Attributes:
        batch: the copy, in the structure of the original.
    """

    def __init__(self, batch: Any) -> None:
        self.batch = apply_to_collection(
            batch, Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad)
        )
        self._tensors = tensors_in(self.batch)

    def copy_from(self, batch: Any) -> None:
        """Copy the values of another batch, of the same signature, into this one."""
        with torch.no_grad():
            for static, tensor in zip(self._tensors, tensors_in(batch), strict=True):
                static.copy_(tensor, non_blocking=True)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self._tensors)
