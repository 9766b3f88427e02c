"""`Fingerprint`: what a captured program depends on, and what may change between two steps."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from ...strategies.engine import ShardedParameter
from .compare import is_constant

_LONGEST = 64  # items of a list or dict that are looked at; a longer one is data, not a setting
# Attributes that Lightning sets around hooks, `log`, which `LogTape` replaces, `forward`, which it
# sets for `ddp`, and those that belong to `nn.Module` itself.
_INTERNAL = {"_current_fx_name", "_metric_attributes", "log", "forward", *vars(nn.Module())}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_ALWAYS = {"training", "_modules", "_hparams", *_HOOKS}
_BASES = (LightningModule, *LightningModule.__mro__)  # whose methods are not the user's


def address(tensor: Tensor) -> int:
    """Return the address of the values; 0 for tensors that are empty, not strided or sharded."""
    with torch._C.DisableTorchFunctionSubclass():
        has_none = tensor.layout is not torch.strided or not tensor.numel()
        return 0 if has_none or isinstance(tensor, ShardedParameter) else tensor.data_ptr()


def state_of(value: Any, depth: int = 2) -> Any:
    """Return the present state of an attribute, to be compared by ``==``.

    It is the value of a constant; the identity, address and ``requires_grad`` of a tensor; the
    state of a generator; and the contents of a short list or dict, a namespace or a dataclass. Of
    any other object it is the identity, beside the object, so that no other one gets its address.
    """
    if is_constant(value):
        return repr(value)
    if isinstance(value, Tensor):
        return id(value), value, address(value), value.requires_grad
    if isinstance(value, torch.Generator):
        return id(value), value, value.get_state().tolist()
    if isinstance(value, SimpleNamespace | Namespace) or (
        is_dataclass(type(value)) and hasattr(value, "__dict__")
    ):
        value = vars(value)
    is_short = isinstance(value, list | tuple | deque | set | frozenset | dict) and depth
    if not is_short or len(value) > _LONGEST:
        return id(value), value
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value), [(key, state_of(each, depth - 1)) for key, each in items]


def attributes_of(root: nn.Module) -> dict[str, Any]:
    """Return the states of all attributes of all modules, by name."""
    found = {}
    for path, module in root.named_modules():
        tables = vars(module), module._modules, module._parameters, module._buffers
        for name, value in (item for table in tables for item in table.items()):
            if name == "training" or name not in _INTERNAL:
                found[f"{path}.{name}".lstrip(".")] = state_of(value)
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def names_read(module: nn.Module, method: str) -> set[str]:
    """Return the names that a method mentions, and the methods that it mentions in turn."""
    names, waiting = set[str](), [method]
    while waiting:
        name = waiting.pop()
        tables = [vars(each) for each in type(module).__mro__ if each not in _BASES]
        for found in (table[name] for table in [vars(module), *tables] if name in table):
            function = found.fget if isinstance(found, property) else inspect.unwrap(found)
            code = getattr(getattr(function, "__func__", function), "__code__", None)
            new = set() if code is None else set(_names_in(code)) - names
            names |= new
            waiting += new
    return names


class Fingerprint:
    """Tells when graphs of a module are out of date.

    It knows modules, their hooks and weights, and of the attributes those that the program
    mentions: of modules, with their hyper-parameters, and of the Trainer.

    Args:
        trainer: the trainer of the run.
        module: the module whose step or call was captured.
        method: the method that was captured; of modules inside it is ``forward``.
    """

    def __init__(self, trainer: Trainer, module: nn.Module, method: str) -> None:
        self._trainer, self._mentioned = trainer, names_read(module, method)
        # Where each value is; the value, if only an assignment can change it; and its state.
        self._spots: list[tuple[str, Mapping[str, Any], str, Any, Any]] = []
        for path, each in module.named_modules():
            if isinstance(each, Metric):
                continue  # its state changes by design
            names = names_read(each, "forward") | (self._mentioned if each is module else set())
            self._mentioned |= names
            names = (names - _INTERNAL) | _ALWAYS
            tables = [(table, names & table.keys()) for table in map(vars, type(each).__mro__)]
            if type(each).__module__.startswith("torch."):
                tables.append((vars(each), names & vars(each).keys()))
            else:  # attributes may be added to it
                tables.append((vars(each), names))
            tables += [(table, set(table)) for table in (each._parameters, each._buffers)]
            for table, name in ((table, name) for table, keys in tables for name in keys):
                state = state_of(value := table.get(name))
                is_fixed = is_constant(value) or state == (id(value), value)
                spot = f"{path}.{name}".lstrip("."), table, name, value if is_fixed else self, state
                self._spots.append(spot)
        # What is no plain value of the Trainer, as its callbacks, is not of the step.
        names = self._mentioned & set(dir(trainer))
        self._of_trainer = [name for name in names if is_constant(getattr(trainer, name))]
        self._before = self._read_others()

    def _read_others(self) -> dict[str, Any]:
        """Return the states of what may lie in another object each time."""
        found: dict[str, Any] = {
            f"trainer.{n}": repr(getattr(self._trainer, n)) for n in self._of_trainer
        }
        found["engine of `zero3`"] = id(getattr(self._trainer.strategy, "engine", None))
        if not self._mentioned.isdisjoint(("param_groups", "get_last_lr")):
            groups = [g for optimizer in self._trainer.optimizers for g in optimizer.param_groups]
            states = [{k: state_of(v) for k, v in g.items() if k != "params"} for g in groups]
            found["a setting of an optimizer"] = states
        return found

    def changes(self) -> list[str]:
        """Return the names of what has changed since."""
        found = [
            name
            for name, table, key, fixed, state in self._spots
            if (value := table.get(key)) is not fixed and state_of(value) != state
        ]
        now = self._read_others()
        found += [name for name in now if now[name] != self._before[name]]
        return [f"`{name}`" for name in found]
