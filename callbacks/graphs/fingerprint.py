"""`Fingerprint`: what a captured program depends on, and what may change between two steps."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from operator import attrgetter
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from ...strategies.engine import ShardedParameter
from .compare import is_constant

_LONGEST = 64  # items of a list or dict that are looked at; a longer one is data, not a setting
_TABLES = ("_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes that Lightning sets around hooks, `log`, which `LogTape` replaces, and those that
# belong to `nn.Module` itself.
_INTERNAL = {"_current_fx_name", "_metric_attributes", "log", *vars(nn.Module())} - {"training"}
_BASES = (LightningModule, *LightningModule.__mro__)  # whose methods are not the user's
_SETTINGS = attrgetter(
    "cudnn.deterministic",
    # `allow_tf32`, the older interface, raises an error after the newer one was used.
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
)


def address(tensor: Tensor) -> int:
    """Return the address of the values; 0 for tensors that are empty, not strided or sharded."""
    with torch._C.DisableTorchFunctionSubclass():
        has_none = tensor.layout is not torch.strided or not tensor.numel()
        return 0 if has_none or isinstance(tensor, ShardedParameter) else tensor.data_ptr()


def state_of(value: Any, depth: int = 2) -> Any:
    """Return the present state of an attribute, to be compared by ``==``.

    It is the value of a constant; the identity, address, hooks and ``requires_grad`` of a tensor;
    the state of a generator; and the contents of a short list or dict, a namespace or a dataclass.
    Of any other object it is the identity, beside the object, so that no other one gets its
    address.
    """
    if isinstance(value, dict) and not value:
        return dict
    if is_constant(value):
        return repr(value)
    if isinstance(value, Tensor):
        # The `__torch_function__` of `zero3`'s parameters hides their addresses.
        with torch._C.DisableTorchFunctionSubclass():
            hooks = value._backward_hooks, value._post_accumulate_grad_hooks
            keys = any(hooks) and [list(each or ()) for each in hooks]
            return id(value), value, address(value), value.requires_grad, keys
    if isinstance(value, torch.Generator):
        return id(value), value, value.get_state().tolist()
    if isinstance(value, SimpleNamespace | Namespace) or (
        is_dataclass(type(value)) and hasattr(value, "__dict__")
    ):
        value = vars(value)
    if not isinstance(value, list | tuple | deque | set | frozenset | dict):
        return id(value), value
    if len(value) > _LONGEST or not depth:
        return id(value), value, len(value)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value), [(key, state_of(each, depth - 1)) for key, each in items]


def attributes_of(root: nn.Module) -> dict[str, Any]:
    """Return the states of all attributes of all modules, by name."""
    found = {}
    for path, module in root.named_modules():
        tables = [vars(module), module._modules, *(getattr(module, table) for table in _TABLES)]
        for name, value in (item for table in tables for item in table.items()):
            if name not in {*_INTERNAL, "forward"}:  # which Lightning sets for `ddp`
                found[f"{path}.{name}".lstrip(".")] = state_of(value)
    return found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, str):
            yield repr(inner)
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def names_read(module: nn.Module, method: str) -> set[str]:
    """Return the names that a method mentions, and the methods that it mentions in turn.

    Texts that they mention are in quotes.
    """
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

    It knows modules, hooks, weights, settings of torch, and of the attributes those that the
    program mentions: of modules, of their classes and hyper-parameters, of the Trainer, and of the
    optimizers' groups.

    Args:
        trainer: the trainer of the run.
        module: the module whose step or call was captured.
        method: the method that was captured; of modules inside it is ``forward``.
    """

    def __init__(self, trainer: Trainer, module: nn.Module, method: str) -> None:
        self._trainer = trainer
        # Where each value is; the value, if only an assignment can change it; and its state.
        self._spots: list[tuple[str, Mapping[str, Any], str, Any, Any]] = []
        hooks = vars(torch.nn.modules.module)
        self._add("", hooks, [name for name in hooks if name.startswith("_global_")])
        self._mentioned = names_read(module, method)
        for path, each in module.named_modules():
            if isinstance(each, Metric):
                continue  # its state changes by design
            names = names_read(each, "forward") | (self._mentioned if each is module else set())
            self._mentioned |= names
            settings = getattr(each, "_hparams", None) or {}
            names = (names | {"training", "forward", *settings}) - _INTERNAL
            path = f"{path}." if path else ""
            if not type(each).__module__.startswith("torch."):  # attributes may be added to it
                self._add(path, vars(each), names - vars(each).keys())
            for table in (settings, vars(each), *map(vars, type(each).__mro__)):
                self._add(path, table, names & table.keys())
            self._add(path, vars(each), ["_modules", "forward", *_HOOKS])
            for table in (each._parameters, each._buffers):
                self._add(path, table, table)
        # What is no plain value of the Trainer, as its callbacks, is not of the step.
        names = self._mentioned & set(dir(trainer))
        self._of_trainer = [name for name in names if is_constant(getattr(trainer, name))]
        if "get_last_lr" in self._mentioned:
            self._mentioned |= {repr("lr"), "param_groups"}
        self._before = self._read_others()

    def _add(self, path: str, table: Mapping[str, Any], names: Any) -> None:
        for name in names:
            state = state_of(value := table.get(name))
            is_fixed = is_constant(value) or state == (id(value), value)
            self._spots.append((path + name, table, name, value if is_fixed else self, state))

    def _read_others(self) -> dict[str, Any]:
        """Return the states of what may lie in another object each time."""
        found: dict[str, Any] = {
            f"trainer.{n}": repr(getattr(self._trainer, n)) for n in self._of_trainer
        }
        for number, optimizer in enumerate(self._trainer.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                where = f"of param group {index} of optimizer {number}"
                found[f"the parameters {where}"] = list(map(id, group["params"]))
                if "param_groups" in self._mentioned:
                    names = [name for name in group if repr(name) in self._mentioned]
                    found |= {f"{name!r} {where}": state_of(group[name]) for name in names}
        found["a setting of torch (determinism, precision, autocast)"] = (
            _SETTINGS(torch.backends),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        )
        found["the engine of `zero3`"] = id(getattr(self._trainer.strategy, "engine", None))
        return found

    def changes(self) -> list[str]:
        """Return the names of what has changed since."""
        found = []
        for name, table, key, fixed, state in self._spots:
            value = table.get(key)
            # Most are constants, or empty tables of hooks: two short ways.
            if value is fixed or (state is dict and value == {}) or state_of(value) == state:
                continue
            found.append(name)
        now = self._read_others()
        if now != self._before:
            names = dict.fromkeys([*self._before, *now])
            found += [name for name in names if now.get(name) != self._before.get(name)]
        return [f"`{name}`" for name in found]
