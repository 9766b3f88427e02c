"""Compares a replay with an eager run of the same micro-batch, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...strategies.engine import Zero3Engine
from .static_inputs import constant, is_constant


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
            if not same(x, y, noisy):
                return f"{name} is {_distance(x, y, runs)}"
        elif x is not y and not (is_constant(x) and constant(x) == constant(y)):
            return f"{name} is {_text(x)} {runs[0]} and {_text(y)} {runs[1]}"
    return None


def _distance(a: Tensor, b: Tensor, runs: tuple[str, str]) -> str:
    if a.shape == b.shape and a.numel() > 1 and not a.is_complex():
        return f"up to {(a.double() - b.double()).abs().max().item():.3g} apart"
    return f"{_text(a)} {runs[0]} and {_text(b)} {runs[1]}"


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return repr(value.item()) if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"


def _generators(module: nn.Module) -> Iterator[tuple[str, torch.Generator]]:
    for path, each in module.named_modules():
        for name, value in vars(each).items():
            if isinstance(value, torch.Generator):
                yield f"{path}.{name}".lstrip("."), value


def generators_of(module: nn.Module, device: torch.device) -> list[torch.Generator]:
    """Return the generators of ``device`` among the attributes of modules."""
    return [g for _, g in _generators(module) if g.device.type == device.type]


class States:
    """Copies of what a step changes in place: buffers and random states.

    Args:
        module: the module with the buffers.
        device: the device of the training.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._buffers = dict(module.named_buffers())
        self._generators = dict(_generators(module))
        self._device = device if device.type == "cuda" else None
        self.values: dict[str, Any] = {
            f"buffer {name}": buffer.detach().clone() for name, buffer in self._buffers.items()
        }
        self.values["the random state of torch"] = torch.get_rng_state()
        if self._device is not None:
            self.values["the random state of the device"] = torch.cuda.get_rng_state(self._device)
        for name, generator in self._generators.items():
            self.values[f"the random state of {name}"] = generator.get_state()

    def restore(self) -> None:
        """Write the values back."""
        for name, buffer in self._buffers.items():
            # hazard: autograd may have saved the buffer; `data` has no part in its version.
            if not same(buffer.detach(), value := self.values[f"buffer {name}"]):
                buffer.data.copy_(value)
        torch.set_rng_state(self.values["the random state of torch"])
        if self._device is not None:
            torch.cuda.set_rng_state(self.values["the random state of the device"], self._device)
        for name, generator in self._generators.items():
            generator.set_state(self.values[f"the random state of {name}"])


class Gradients:
    """Copies of gradients; with `zero3`, of this rank's parts of them.

    Args:
        module: the module with the parameters.
        engine: the engine of `zero3`, if there is one.
    """

    def __init__(self, module: nn.Module, engine: Zero3Engine | None) -> None:
        self._engine = engine
        self._entries = [] if engine is None else [e for u in engine.units for e in u.trained]
        self._parameters = dict(module.named_parameters()) if engine is None else {}
        found = {name: parameter.grad for name, parameter in self._parameters.items()}
        if engine is not None:
            found = {e.name: engine.gradients.part(e) for e in self._entries}
        self.values = {
            f"the gradient of {name}": grad.detach().clone()
            for name, grad in found.items()
            if grad is not None
        }

    def restore(self, as_zeros: bool = False) -> None:
        """Write the values back.

        Args:
            as_zeros: where there was no gradient and is one now, make it zero, so that a replay can
                add to it; otherwise there is none again.
        """
        for name, parameter in self._parameters.items():
            value = self.values.get(f"the gradient of {name}")
            if parameter.grad is None or (value is None and not as_zeros):
                parameter.grad = value
            else:
                _fill(parameter.grad, value)
        for entry in self._entries:
            assert self._engine is not None
            gradients, value = (
                self._engine.gradients,
                self.values.get(f"the gradient of {entry.name}"),
            )
            if value is not None or (as_zeros and gradients.has_gradient(entry)):
                _fill(gradients.room_for(entry), value)
            elif gradients.has_gradient(entry):
                gradients.clear(entry)


def _fill(tensor: Tensor, value: Tensor | None) -> None:
    if value is None:
        tensor.zero_()
    else:
        tensor.copy_(value)
