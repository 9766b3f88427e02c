"""`Fingerprint`: what a captured program depends on, and what may change between two steps."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import partial
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from ...strategies.engine import ShardedParameter
from ...strategies.support import DisableTorchFunctionSubclass
from .compare import is_constant

_LONGEST = 64  # items of a list or dict that are looked at; a longer one is data, not a setting
# Attributes that Lightning sets around hooks, `log`, which `LogTape` replaces, `forward`, which it
# sets for `ddp`, and those that belong to `nn.Module` itself.
_INTERNAL = {"_current_fx_name", "_metric_attributes", "log", "forward", *vars(nn.Module())}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALWAYS = {"training", "_modules", "_hparams", *_HOOKS}
_BASES = (LightningModule, *LightningModule.__mro__)  # whose methods are not the user's


def state_of(value: Any, device: torch.device, depth: int = 2) -> Any:
    """Return the present state of an attribute, to be compared by ``==``.

    Of any object that is no constant, tensor, generator or short container it is the identity,
    beside the object, so that no other one gets its address.
    """
    if value is None or (isinstance(value, dict) and not value):  # as most attributes and hooks
        return type(value)
    if is_constant(value):
        return repr(value)
    if isinstance(value, Tensor):
        with DisableTorchFunctionSubclass():
            has_address = value.layout is torch.strided and not isinstance(value, ShardedParameter)
            address = has_address and value.data_ptr()
            return id(value), value, address, value.requires_grad, value_of(value, device)
    if isinstance(value, torch.Generator):
        return id(value), value, value.get_state().tolist()
    items = _items_of(value) if depth else None
    if items is None:
        return id(value), value
    return type(value), [(key, state_of(each, device, depth - 1)) for key, each in items]


def value_of(tensor: Tensor, device: torch.device) -> Any:
    """Return the values that graphs on ``device`` keep if they read a tensor on the CPU, or None.

    A kernel gets a number that is on the CPU as an argument, which replays repeat. For the values
    of a large tensor its version stands.
    """
    is_read = tensor.device.type == "cpu" != device.type and tensor.layout is torch.strided
    if not is_read:
        return None
    if tensor.numel() <= _LONGEST:
        return repr(tensor.tolist())
    return tensor.is_inference() or tensor._version


def _items_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what is in a short list or dict, a namespace or a dataclass; None for others."""
    if isinstance(value, SimpleNamespace | Namespace) or (
        is_dataclass(type(value)) and hasattr(value, "__dict__")
    ):
        value = vars(value)
    is_plain = isinstance(value, list | tuple | deque | set | frozenset | dict)
    if not is_plain or len(value) > _LONGEST:
        return None
    return [*(value.items() if isinstance(value, dict) else enumerate(value))]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def names_read(module: nn.Module, method: str) -> set[str]:
    """Return the names that a method mentions, and the methods that it mentions in turn."""
    names, waiting = set[str](), [method]
    tables = [vars(module), *(vars(each) for each in type(module).__mro__ if each not in _BASES)]
    while waiting:
        name = waiting.pop()
        for found in (table[name] for table in tables if name in table):
            function = found.fget if isinstance(found, property) else inspect.unwrap(found)
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            new = set() if code is None else set(_names_in(code)) - names
            names |= new
            waiting += new
    return names


Spot = tuple[str, Callable[[], Any]]  # the name of a value, and what gets it


def attributes_of(root: nn.Module, method: str | None = None) -> Iterator[Spot]:
    """Yield what may change in ``root`` and in the modules inside it: all attributes; or hooks,
    weights, and what a ``method`` of ``root``, or the ``forward`` of a module, mentions.
    """
    for path, module in root.named_modules():
        if method is None:
            names = set(vars(module))
        elif isinstance(module, Metric):
            continue  # its state changes by design
        else:
            names = names_read(module, "forward")
            names |= names_read(root, method) if module is root else set()
        names = (names - _INTERNAL) | _ALWAYS
        tables = [(table, names & table.keys()) for table in map(vars, type(module).__mro__)]
        tables.append((vars(module), names))  # those that will be added, too
        tables += [(table, set(table)) for table in (module._parameters, module._buffers)]
        for table, keys in tables:
            for key in keys:
                yield f"{path}.{key}".lstrip("."), partial(table.get, key)


def tensors_of(root: nn.Module) -> dict[str, Tensor]:
    """Return by name the tensors that ``root`` and the modules inside it keep beside parameters,
    in buffers and other attributes: a program may write into them in place.
    """
    found = dict[str, Tensor]()

    def note(name: str, value: Any, depth: int) -> None:
        for key, each in (_items_of(value) if depth else None) or ():
            note(f"{name}[{key!r}]", each, depth - 1)
        if isinstance(value, Tensor) and value.layout is torch.strided:
            # Nobody can write into a tensor of an inference, but in an inference.
            if not (isinstance(value, nn.Parameter) or value.is_inference()):
                found[f"`self.{name}`"] = value

    for name, get in attributes_of(root):
        note(name, get(), 2)
    return found


class Fingerprint:
    """Tells when graphs of a program are out of date: of a method of ``module``, and the
    ``forward`` of the modules inside it.

    It knows hooks and weights of modules, their attributes that the program mentions, with the
    hyper-parameters, and those of the Trainer.
    """

    def __init__(self, trainer: Trainer, module: nn.Module, method: str) -> None:
        spots = [*attributes_of(module, method)]
        spots.append(("engine of `zero3`", partial(getattr, trainer.strategy, "engine", None)))
        reads = [names_read(each, "forward") for each in module.modules()]
        for key in names_read(module, method).union(*reads) & set(dir(trainer)):
            # What is no plain value of the Trainer, as its callbacks, is not of the step.
            if is_constant(getattr(trainer, key)):
                spots.append((f"trainer.{key}", partial(getattr, trainer, key)))
        self._device = trainer.strategy.root_device
        self._spots = [(name, get, state_of(get(), self._device)) for name, get in spots]

    def changes(self) -> list[str]:
        """Return the names of what has changed since."""
        return [
            f"`{name}`"
            for name, get, state in self._spots
            if state_of(get(), self._device) != state
        ]
