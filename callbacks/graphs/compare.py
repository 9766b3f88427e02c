"""Compares a replay with an eager run of the same, number by number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from ...strategies.support import capture_random_states, restore_random_states

_CONSTANTS = (int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device)


def is_constant(value: Any) -> bool:
    """Return whether its ``repr`` distinguishes ``value`` from others, as ``True`` from ``1``."""
    return isinstance(value, _CONSTANTS)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of inputs or an output, in a fixed order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor  # a packed sequence is made anew, and must have tensors

    apply_to_collection(value, Tensor, note)
    return found


def copy_of(value: Any) -> Any:
    """Return a copy of a tensor, without its history; or another value as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def values_in(tree: Any, name: str) -> dict[str, Any]:
    """Return what is in a tree of values, such as an output, by name; of tensors copies."""
    found, _ = tree_flatten_with_path(tree)
    return {f"{name}{keystr(path)}": copy_of(each) for path, each in found}


def same(a: Tensor, b: Tensor, noisy: bool = False) -> bool:
    """Return whether two tensors have equal values; NaN is NaN, and ``0.0`` is ``-0.0``.

    If kernels are ``noisy``, they give other bits each time: half of the digits must be the same.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.allclose(a, b, 0, 0, equal_nan=True):
        return True
    if not (noisy and a.is_floating_point()):
        return False
    tolerance = torch.finfo(a.dtype).eps ** 0.5
    return bool((a.double() - b.double()).norm() <= tolerance * b.double().norm())


def first_difference(a: dict[str, Any], b: dict[str, Any], noisy: bool = False) -> str | None:
    """Return in words the first value in which a replay ``a`` and an eager run ``b`` differ."""
    for name in b | a:
        x, y = a.get(name, "nothing"), b.get(name, "nothing")
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if same(x, y, noisy):
                continue
            if x.shape == y.shape and x.numel() > 1:
                apart = (x.to(torch.complex128) - y.to(torch.complex128)).abs().max().item()
                return f"{name} is up to {apart:.3g} apart"
        elif x is y or (is_constant(x) and repr(x) == repr(y)):
            continue
        return f"{name} is {_text(x)} in the replay and {_text(y)} in the eager step"
    return None


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return repr(value.item()) if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"


class States:
    """Copies of what a program changes in place, in ``values``, by a name for messages.

    These are tensors, random states and, of the engine to whose gradients it adds, this rank's
    parts of these, beside the units whose backward is to come.
    """

    def __init__(self, tensors: dict[str, Tensor], engine: Any) -> None:
        self._tensors, self._engine, self._random = tensors, engine, capture_random_states()
        entries = engine.gradients.trained if engine else []
        self._entries = {f"the gradient of {entry.name}": entry for entry in entries}
        parts = {name: engine.gradients.part(entry) for name, entry in self._entries.items()}
        found = tensors | {name: part for name, part in parts.items() if part is not None}
        self.values = {name: copy_of(tensor) for name, tensor in found.items()}
        self.values |= values_in(self._random, "the random state")
        self._coming = engine and engine.passes.coming.copy()

    def restore(self) -> None:
        """Write the values back."""
        for name, tensor in self._tensors.items():
            # hazard: autograd may have saved the tensor; `data` has no part in its version.
            if not same(tensor.detach(), self.values[name]):
                tensor.data.copy_(self.values[name])
        restore_random_states(self._random)
        for name, entry in self._entries.items():
            gradients = self._engine.gradients
            if name in self.values:
                gradients.room_for(entry).copy_(self.values[name])
            elif gradients.has_gradient(entry):
                gradients.clear(entry)
        if self._engine:
            self._engine.passes.coming = self._coming.copy()


@contextmanager
def replaced(table: dict[str, Any], values: dict[str, Any]) -> Iterator[None]:
    """Replace items of ``table``, such as the attributes of an object, in the body."""
    before = {name: table[name] for name in values if name in table}
    table.update(values)
    try:
        yield
    finally:
        for name in values:
            del table[name]
        table.update(before)


class LogTape:
    """The calls of ``self.log`` (and ``self.log_dict``) in a program, in their order.

    Inside of a capture, ``self.log`` would add a value to Lightning's sums only once, and each
    replay to the sums of that time. So the calls are recorded instead, and made after each replay.
    """

    def __init__(self, module: LightningModule) -> None:
        # Name, value and options of each call; tensors are copies, which a replay refills.
        self._module, self._calls = module, list[tuple[str, Any, tuple, dict[str, Any]]]()

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        # hazard: the program may change the tensor in place after the call; keep a copy.
        self._calls.append((name, copy_of(value), args, options))

    def record(self) -> AbstractContextManager[None]:
        """Replace ``module.log`` in the body by a function that only records the call."""
        return replaced(vars(self._module), {"log": self._log})

    def play(self) -> None:
        """Make the recorded calls with the values that the tensors have now."""
        for name, value, args, options in self._calls:
            self._module.log(name, copy_of(value), *args, **options)

    def values(self) -> dict[str, Any]:
        """Return all logged values by a name for messages, with the options; tensors as copies."""
        return {
            f"`self.log({name!r}, ...)`, call {k} of the step, with {options},": copy_of(value)
            for k, (name, value, *options) in enumerate(self._calls)
        }
