"""Compares a replay with an eager run of the same, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from ...strategies.engine import Entry

_CONSTANTS = (int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)


def is_constant(value: Any) -> bool:
    """Return whether its ``repr`` distinguishes ``value`` from other values.

    It tells ``True`` from ``1``, and ``0.0`` from ``-0.0``; NaN is NaN.
    """
    return isinstance(value, _CONSTANTS)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of inputs or an output, in a fixed order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor  # a packed sequence is made anew, and must have tensors

    apply_to_collection(value, Tensor, note)
    return found


def values_in(output: Any) -> dict[str, Any]:
    """Return what a program returned, by name; of tensors copies."""
    return {
        f"the output{keystr(path)}": each.detach().clone() if isinstance(each, Tensor) else each
        for path, each in tree_flatten_with_path(output)[0]
    }


def same(a: Tensor, b: Tensor, noisy: bool = False) -> bool:
    """Return whether two tensors have the same bits; NaN is NaN, and ``0.0`` is ``-0.0``.

    Args:
        a: a tensor.
        b: another one.
        noisy: whether the kernels give other bits each time: half of the digits must be the same.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()):
        return True
    if not (noisy and a.is_floating_point()):
        return False
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    return bool((a.double() - b.double()).norm() <= tolerance * b.double().norm())


def first_difference(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    runs: tuple[str, str] = ("in the replay", "in the eager step"),
    noisy: bool = False,
) -> str | None:
    """Return in words the first of some named values in which two runs differ, or None.

    Args:
        a: tensors, constants and other objects of one run by name.
        b: those of the other.
        runs: what the runs are called.
        noisy: see :func:`same`.
    """
    for name in dict.fromkeys([*b, *a]):
        x, y = a.get(name), b.get(name)
        if (name in a) != (name in b):
            return f"{name} is there {runs[name in b]} only"
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if same(x, y, noisy):
                continue
            if x.shape == y.shape and x.numel() > 1 and not x.is_complex():
                return f"{name} is up to {(x.double() - y.double()).abs().max().item():.3g} apart"
        elif x is y or (is_constant(x) and repr(x) == repr(y)):
            continue
        return f"{name} is {_text(x)} {runs[0]} and {_text(y)} {runs[1]}"
    return None


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return repr(value.item()) if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"


class States:
    """Copies of what a program changes in place: buffers, random states and gradients.

    Args:
        module: the module with the buffers.
        device: the device of the training.
        gradients: whether to copy the gradients of the module's parameters.
        engine: the engine of `zero3`, of whose gradients this rank's parts are copied.

    Attributes:
        values: the copies, by a name for messages.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        gradients: bool = False,
        engine: Any = None,
    ) -> None:
        self._engine, self._device = engine, device if device.type == "cuda" else None
        self._buffers = {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
        self._grads: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._entries: dict[str, Entry] = {}
        if gradients and engine is None:
            named = module.named_parameters()
            self._grads = {f"the gradient of {n}": (p, p.grad) for n, p in named}
        elif gradients and engine is not None:
            entries = [entry for unit in engine.units for entry in unit.trained]
            self._entries = {f"the gradient of {entry.name}": entry for entry in entries}
        found = self._buffers | {name: grad for name, (_, grad) in self._grads.items()}
        for name, entry in self._entries.items():
            found[name] = self._engine.gradients.part(entry)
        self.values: dict[str, Tensor] = {
            name: tensor.detach().clone() for name, tensor in found.items() if tensor is not None
        }
        self.values["the random state of torch"] = torch.get_rng_state()
        if self._device is not None:
            self.values["the random state of the device"] = torch.cuda.get_rng_state(self._device)

    def restore(self) -> None:
        """Write the values back."""
        for name, buffer in self._buffers.items():
            # hazard: autograd may have saved the buffer; `data` has no part in its version.
            if not same(buffer.detach(), self.values[name]):
                buffer.data.copy_(self.values[name])
        torch.set_rng_state(self.values["the random state of torch"])
        if self._device is not None:
            torch.cuda.set_rng_state(self.values["the random state of the device"], self._device)
        for name, (parameter, grad) in self._grads.items():
            parameter.grad = grad
            if grad is not None:
                grad.detach().copy_(self.values[name])
        for name, entry in self._entries.items():
            if name in self.values:
                self._engine.gradients.room_for(entry).copy_(self.values[name])
            elif self._engine.gradients.has_gradient(entry):
                self._engine.gradients.clear(entry)
