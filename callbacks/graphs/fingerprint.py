"""`Fingerprint`: what a captured step depends on, and what may change between two steps."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import CodeType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from ...strategies.engine import ShardedParameter
from .static_inputs import constant, is_constant

_LONGEST = 64  # items of a list or dict that are looked at; a longer one is data, not a setting
_TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes that Lightning sets around hooks, `log`, which `LogTape` replaces, and those that
# belong to `nn.Module` itself.
_INTERNAL = {"_current_fx_name", "_metric_attributes", "log", *vars(nn.Module())} - {"training"}
_BASES = (LightningModule, *LightningModule.__mro__)  # whose methods are not the user's
_GLOBAL_HOOKS = [
    item
    for item in vars(torch.nn.modules.module).items()
    if item[0].startswith("_global_") and isinstance(item[1], dict)
]


class _Itself:
    """Equals another of the same object, which it keeps alive: no other gets its address."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def address(tensor: Tensor) -> int:
    """Return the address of the values; 0 for tensors that are empty, not strided or sharded."""
    with torch._C.DisableTorchFunctionSubclass():
        has_none = tensor.layout is not torch.strided or not tensor.numel()
        return 0 if has_none or isinstance(tensor, ShardedParameter) else tensor.data_ptr()


def state_of(value: Any, depth: int = 2) -> Any:
    """Return the present state of an attribute, to be compared by ``==``.

    It is the value of a constant, the identity, the address and ``requires_grad`` of a tensor, and
    the contents of a short list or dict, a namespace or a dataclass. Of any other object it is the
    identity.
    """
    if is_constant(value):
        return constant(value)
    if isinstance(value, Tensor):
        return _Itself(value), address(value), value.requires_grad
    if isinstance(value, np.random.Generator):
        return _Itself(value), repr(value.bit_generator.state)
    if isinstance(value, SimpleNamespace | Namespace) or (
        is_dataclass(type(value)) and hasattr(value, "__dict__")
    ):
        value = vars(value)
    if not isinstance(value, list | tuple | deque | set | frozenset | dict):
        return _Itself(value)
    if len(value) > _LONGEST or not depth:
        return _Itself(value), len(value)
    items = value.items() if isinstance(value, dict) else value
    return type(value), [state_of(each, depth - 1) for each in items]


def attributes_of(root: nn.Module) -> dict[str, Any]:
    """Return the states of all attributes of all modules, by name."""
    found = {}
    for path, module in root.named_modules():
        tables = [vars(module), *(getattr(module, table) for table in _TABLES)]
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


def _flags() -> tuple:
    devices, backends = ("cpu", "cuda"), cast(Any, torch.backends)
    precise = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        # `allow_tf32`, the older interface, raises an error after the newer one was used.
        *(each.fp32_precision for each in (*precise, backends.mkldnn.matmul)),
        torch.is_grad_enabled(),
        *map(torch.is_autocast_enabled, devices),
        *map(torch.get_autocast_dtype, devices),
    )


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
        self._tables: list[tuple[str, dict]] = list(_GLOBAL_HOOKS)
        # Where an attribute is, its value if only an assignment can change it, and its state.
        self._spots: list[tuple[str, Mapping[str, Any], str, Any, Any]] = []
        # Of each module the names that count and that it does not have.
        self._sizes: list[tuple[str, dict, int, set[str]]] = []
        self._tensors: list[tuple[str, Tensor]] = []
        mentioned = names_read(module, method)
        for path, each in module.named_modules():
            if isinstance(each, Metric):
                continue  # its state changes by design
            names = names_read(each, "forward") | (mentioned if each is module else set())
            mentioned = mentioned | names
            self._add_module(f"{path}." if path else "", each, names)
        # So that no others get their ids.
        self._held = [list(table.values()) for _, table in self._tables]
        # What is no plain value of the Trainer, as its callbacks, is not of the step.
        names = {n for n in mentioned & set(dir(trainer)) if is_constant(getattr(trainer, n))}
        self._trainer_names = sorted(names)
        self._texts = mentioned if mentioned & {"param_groups", "get_last_lr"} else set()
        if "get_last_lr" in mentioned:
            self._texts = self._texts | {repr("lr")}
        self._before = self._read()

    def _add_module(self, path: str, module: nn.Module, names: set[str]) -> None:
        attributes, hyper_parameters = vars(module), getattr(module, "_hparams", None) or {}
        tables = ((path + name, getattr(module, name)) for name in (*_TABLES, *_HOOKS))
        self._tables += [each for each in tables if isinstance(each[1], dict)]
        classes = [vars(cls) for cls in type(module).__mro__ if cls not in _BASES]
        names = (names | {"training", "forward", *hyper_parameters}) - _INTERNAL
        self._sizes.append((path, attributes, len(attributes), names - attributes.keys()))
        for table in (*classes, hyper_parameters, attributes):
            for name in names & table.keys():
                state = state_of(value := table[name])
                is_fixed = is_constant(value) or type(state) is _Itself
                spot = path + name, table, name, value if is_fixed else self, state
                self._spots.append(spot)
        for tensors in (module._parameters, module._buffers):
            self._tensors += [(path + n, t) for n, t in tensors.items() if t is not None]

    def _read(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            name: tuple(map(id, table.values())) for name, table in self._tables if table
        }
        for key, table, name, fixed, state in self._spots:
            value = table.get(name)
            found[key] = state if value is fixed else state_of(value)
        for path, attributes, size, missing in self._sizes:
            if len(attributes) != size:
                found |= {path + name: "assigned" for name in missing & attributes.keys()}
        # The `__torch_function__` of `zero3`'s parameters hides their addresses.
        with torch._C.DisableTorchFunctionSubclass():
            for key, tensor in self._tensors:
                hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
                keys = any(hooks) and [list(each or ()) for each in hooks]
                found[key] = address(tensor), tensor.requires_grad, keys
        for name in self._trainer_names:
            found[f"trainer.{name}"] = constant(getattr(self._trainer, name))
        for number, optimizer in enumerate(self._trainer.optimizers):
            for index, group in enumerate(optimizer.param_groups):
                where = f"param group {index} of optimizer {number}"
                found[f"the parameters of {where}"] = list(map(id, group["params"]))
                names = {n for n in group if self._texts and repr(n) in self._texts}
                found |= {f"{name!r} of {where}": state_of(group[name]) for name in names}
        found["a setting of torch (determinism, precision, autocast, attention)"] = _flags()
        found["the engine of `zero3`"] = id(getattr(self._trainer.strategy, "engine", None))
        return found

    def changes(self) -> list[str]:
        """Return the names of what has changed since."""
        now = self._read()
        if now == self._before:
            return []
        names = dict.fromkeys([*self._before, *now])
        return [f"`{name}`" for name in names if now.get(name) != self._before.get(name)]
