"""`Guard` and `Snapshot`: module state that graphs depend on, and that a step has changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from .frozen_values import Everything, address, freeze, is_constant, is_itself, settings_of

_ABSENT = object()
_TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Not compared by name: Lightning sets the first two around hooks, `LogTape` sets `log`, tables are
# compared separately, and the rest is internal to `nn.Module`.
_IGNORED = {
    "_current_fx_name",
    "_metric_attributes",
    "log",
    *_TABLES,
    *(vars(nn.Module()).keys() - {"training"}),
}
# Hooks of all modules.
_GLOBAL_HOOKS = [
    table
    for name, table in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(table, dict)
]


def _modules(root: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their names, also those in attributes that are lists or dicts.

    Metrics are left out, because their state changes by design.
    """
    seen: set[nn.Module] = set()
    waiting = [(name, root)]
    while waiting:
        name, module = waiting.pop()
        if module in seen or isinstance(module, Metric):
            continue
        seen.add(module)
        yield name, module
        waiting += [
            (f"{name}.{n}".lstrip("."), child)
            for n, child in _children(module)
            if isinstance(child, nn.Module)
        ]


def _children(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module._modules.items()
    for name, value in module.__dict__.items():
        if name not in _IGNORED and isinstance(value, list | tuple | dict):
            yield from (
                (name, each) for each in (value.values() if isinstance(value, dict) else value)
            )


_PRECISE = (
    *(torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn),
    *(torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv, torch.backends.mkldnn.rnn),
)


def _flags() -> tuple:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        # `allow_tf32`, the older interface, raises an error after the newer one was used.
        *(each.fp32_precision for each in _PRECISE),
        torch.is_grad_enabled(),
        *(
            setting(device)
            for device in ("cpu", "cuda")
            for setting in (torch.is_autocast_enabled, torch.get_autocast_dtype)
        ),
    )


class Guard:
    """Detects when graphs of a module's step are out of date.

    It compares before each replay, so it is made for speed: flat lists, and little Python for each
    module.

    Args:
        module: the module whose step was captured.
        optimizers: the optimizers whose param groups must stay.
        names: names of the attributes that the step mentions; others may change freely.
        globals: tables, and a name in each, of other values that the step reads.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: list[Optimizer],
        names: set[str],
        globals: Iterable[tuple[Mapping[str, Any], str]] = (),
    ) -> None:
        self._names = (names | {"training"}) - _IGNORED
        self._tables: list[tuple[str, dict, tuple[int, ...]]] = []
        self._empty: list[dict] = []
        self._sizes: list[tuple[str, dict, int]] = []
        self._values: list[tuple[str, Mapping, str, Any, Any]] = []
        self._tensors: list[tuple[str, Tensor, int, bool, list[int]]] = []
        self._held: list[Any] = []  # keeps objects alive, so that no others get their ids
        for table in _GLOBAL_HOOKS:
            self._add_table("torch", table)
        classes: dict[type, None] = {}
        for path, each in _modules(module):
            for table in (
                getattr(each, t) for t in (*_TABLES, *_HOOKS) if isinstance(getattr(each, t), dict)
            ):
                self._add_table(path, table)
            classes.update(dict.fromkeys(type(each).__mro__))
            self._sizes.append((path, each.__dict__, len(each.__dict__)))
            self._add_values(path, each.__dict__, self._names & each.__dict__.keys())
            for name, tensor in (*each._parameters.items(), *each._buffers.items()):
                if tensor is not None:
                    where = f"{path}.{name}".lstrip(".")
                    self._tensors.append(
                        (where, tensor, address(tensor), tensor.requires_grad, _hooks_of(tensor))
                    )
        for cls in classes:
            self._add_values(cls.__name__, vars(cls), self._names & settings_of(cls).keys())
        for table, name in globals:
            self._add_values(table.get("__name__", ""), table, [name])
        self._flags = _flags()
        self._lists = [
            (group["params"], list(group["params"])) for o in optimizers for group in o.param_groups
        ]
        self._groups = [(optimizer, len(optimizer.param_groups)) for optimizer in optimizers]

    def _add_table(self, path: str, table: dict) -> None:
        if table:
            self._tables.append((path, table, tuple(map(id, table.values()))))
            self._held += table.values()
        else:
            self._empty.append(table)

    def _add_values(self, path: str, table: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in sorted(names):
            value = table[name]
            frozen = freeze(value, self._names)
            self._values.append(
                (path, table, name, value if is_itself(value, frozen) else _ABSENT, frozen)
            )

    def changed(self) -> str | None:
        """Return in words a change since the capture, or None."""
        # The `__torch_function__` of `zero3`'s parameters hides their addresses.
        with torch._C.DisableTorchFunctionSubclass():
            return (
                self._tables_changed()
                or self._values_changed()
                or self._tensors_changed()
                or self._rest_changed()
            )

    def _tables_changed(self) -> str | None:
        if any(map(len, self._empty)):
            return "a module, parameter, buffer or hook was added"
        for path, table, ids in self._tables:
            if tuple(map(id, table.values())) != ids:
                return (
                    f"a module, parameter, buffer or hook of {path or 'the module'} was added,"
                    " replaced or removed"
                )
        return None

    def _values_changed(self) -> str | None:
        for path, table, size in self._sizes:
            if len(table) != size and (
                added := self._names
                & table.keys() - {n for _, t, n, _, _ in self._values if t is table}
            ):
                return f"`{path}.{min(added)}` was assigned".replace("`.", "`")
        for path, table, name, value, frozen in self._values:
            if (now := table.get(name)) is not value and freeze(now, self._names) != frozen:
                told = repr(now) if is_constant(now) else "something else"
                return f"`{path}.{name}` changed to {told}".replace("`.", "`")
        return None

    def _tensors_changed(self) -> str | None:
        for name, tensor, place, needs_grad, hooks in self._tensors:
            if tensor.requires_grad is not needs_grad:
                return f"{name} was {'frozen' if needs_grad else 'unfrozen'}"
            if address(tensor) != place:
                return f"{name} lies in other memory"
            if (
                hooks or tensor._backward_hooks or tensor._post_accumulate_grad_hooks
            ) and hooks != _hooks_of(tensor):
                return f"a hook of {name} was added or removed"
        return None

    def _rest_changed(self) -> str | None:
        if any(len(o.param_groups) != count for o, count in self._groups):
            return "a group of parameters was added to the optimizer"
        if any(list(map(id, now)) != list(map(id, then)) for now, then in self._lists):
            return "parameters joined or left the optimizer"
        return (
            None
            if _flags() == self._flags
            else "a setting of torch changed (determinism, precision, autocast, attention)"
        )


def _hooks_of(tensor: Tensor) -> list[int]:
    tables = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return [id(hook) for table in tables if table for hook in table.values()]


class GroupSettings(Mapping[str, dict[int, Any]]):
    """Settings of all param groups of an optimizer, by name: ``{number of the group: value}``.

    It reads ``param_groups`` at each access, because `Optimizer.load_state_dict` replaces them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, name: str) -> dict[int, Any]:
        if found := {
            k: group[name] for k, group in enumerate(self._optimizer.param_groups) if name in group
        }:
            return found
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter({name for group in self._optimizer.param_groups for name in group})

    def __len__(self) -> int:
        return len(set(self))


class Snapshot:
    """The attributes of all modules, and of their classes, before a step."""

    def __init__(self, module: nn.Module) -> None:
        holders: dict[nn.Module | type, str] = {each: path for path, each in _modules(module)}
        for each, path in list(holders.items()):
            holders |= {cls: path for cls in type(each).__mro__ if cls not in holders}
        self._before = [(path, holder, _attributes(holder)) for holder, path in holders.items()]

    def changes(self) -> list[str]:
        """Return the names of attributes that were assigned since, or whose contents changed."""
        found = set()
        for path, holder, before in self._before:
            after = _attributes(holder)
            for name in before.keys() | after.keys():
                if before.get(name) != after.get(name):
                    found.add(f"{path}.{name}".lstrip("."))
        return sorted(found)


def _attributes(module: nn.Module | type) -> dict[str, Any]:
    if isinstance(module, type):
        return {
            k: freeze(v, Everything())
            for k, v in settings_of(module).items()
            if not k.startswith("__")
        }
    values = {k: v for k, v in module.__dict__.items() if k not in _IGNORED}
    values |= {k: v for table in _TABLES for k, v in getattr(module, table).items()}
    return {k: freeze(v, Everything()) for k, v in values.items()}
