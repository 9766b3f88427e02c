"""Signatures of inputs, and the fixed memory that a graph reads its inputs from."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .frozen_values import constant, is_constant


class UnsupportedBatch(TypeError):
    """A batch holds something that cannot be an input of a graph."""


def signature(value: Any, where: str = "batch") -> Hashable:
    """Return a key that is equal for batches which one graph can take.

    It consists of the structure; the shape, strides, dtype, device and ``requires_grad`` of each
    tensor; and the values of all constants.

    Args:
        value: a batch, or a part of one.
        where: the name of ``value`` in errors.

    Raises:
        UnsupportedBatch: an object is neither a dense tensor, nor a constant, nor a known container
            of these.
    """
    if type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided:
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if is_constant(value):
        return constant(value)
    # Recurrent layers of torch read `batch_sizes` on the host, so a graph would keep the values.
    if isinstance(value, PackedSequence):
        return PackedSequence, signature(value.data, where), tuple(value.batch_sizes.tolist())
    if isinstance(value, Mapping):
        return type(value), tuple(
            (key, signature(item, f"{where}[{key!r}]")) for key, item in value.items()
        )
    if isinstance(value, list | tuple):
        return type(value), tuple(signature(item, f"{where}[{k}]") for k, item in enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(
            signature(getattr(value, f.name), f"{where}.{f.name}") for f in fields(value)
        )
    raise UnsupportedBatch(
        f"{where} is a {'sparse ' if isinstance(value, Tensor) else ''}"
        f"{type(value).__module__}.{type(value).__qualname__}."
        " What goes into a graph and comes out are dense tensors and constants in lists, tuples,"
        " dicts and dataclasses."
    )


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
