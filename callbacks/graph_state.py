"""State of modules that a graph depends on (`Guard`), or that a step changes behind a graph's back (`Snapshot`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

MAX_RECAPTURES = 5  # in a run: what goes out of date more often is not worth it
_PLAIN = (int, float, complex, bool, str, type(None), torch.dtype)
_ABSENT = object()  # what a class may have a value for
_TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Lightning's own, written around every hook.
_IGNORED = {"_current_fx_name", "_metric_attributes", "log", *_TABLES, *_HOOKS}


def _modules(root: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules but metrics, whose state changes by design."""
    seen: set[nn.Module] = set()
    waiting = [(name, root)]
    while waiting:
        name, module = waiting.pop()
        if module in seen or isinstance(module, Metric):
            continue
        seen.add(module)
        yield name, module
        waiting += [(f"{name}.{n}".lstrip("."), child) for n, child in module._modules.items() if child is not None]


def _flags() -> tuple:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_default_dtype(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


def _address(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if tensor.is_sparse or not tensor.numel() else tensor.data_ptr()


class Guard:
    """Tells when graphs of a module's step are out of date.

    Compared before each replay, so it is made for speed: flat lists, and loops that run in C.

    Args:
        module: whose step was captured.
        optimizers: whose groups of parameters are the same.
        names: of the attributes that the program of the step mentions; others may change as they like.
    """

    def __init__(self, module: nn.Module, optimizers: list[Optimizer], names: set[str]) -> None:
        self._tables: list[tuple[str, dict, tuple[int, ...]]] = []
        self._empty: list[dict] = []
        self._plain: list[tuple[str, dict, list[str], list]] = []
        self._tensors: list[tuple[str, Tensor, int, bool]] = []
        self._held: list[Any] = []  # ids belong to objects that live
        names = (names | {"training"}) - _IGNORED
        for path, each in _modules(module):
            for table in (getattr(each, t) for t in (*_TABLES, *_HOOKS) if isinstance(getattr(each, t), dict)):
                if table:
                    self._tables.append((path, table, tuple(map(id, table.values()))))
                    self._held += table.values()
                else:
                    self._empty.append(table)
            found = [n for n in names if isinstance(each.__dict__.get(n, getattr(type(each), n, _ABSENT)), _PLAIN)]
            self._plain.append((path, each.__dict__, found, [each.__dict__.get(n, _ABSENT) for n in found]))
            for name, tensor in (*each._parameters.items(), *each._buffers.items()):
                if tensor is not None:
                    self._tensors.append((f"{path}.{name}".lstrip("."), tensor, _address(tensor), tensor.requires_grad))
        self._flags = _flags()
        self._lists = [(group["params"], list(group["params"])) for o in optimizers for group in o.param_groups]
        self._groups = [(optimizer, len(optimizer.param_groups)) for optimizer in optimizers]

    def changed(self) -> str | None:
        """What is not as it was at the capture, in words; None if all is."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters of `zero3` do not tell their address otherwise
            return self._changed()

    def _changed(self) -> str | None:
        if any(map(len, self._empty)):
            return "a module, parameter, buffer or hook was added"
        for path, table, ids in self._tables:
            if tuple(map(id, table.values())) != ids:
                return f"a module, parameter, buffer or hook of {path or 'the module'} was added, replaced or removed"
        for path, table, names, values in self._plain:
            if [table.get(n, _ABSENT) for n in names] != values:
                name = next(n for n, v in zip(names, values, strict=True) if table.get(n, _ABSENT) != v)
                return f"`{path}.{name}` changed to {table.get(name)!r}".replace("`.", "`")
        for name, tensor, address, needs_grad in self._tensors:
            if tensor.requires_grad is not needs_grad:
                return f"{name} was {'frozen' if needs_grad else 'unfrozen'}"
            if _address(tensor) != address:
                return f"{name} lies in other memory"
        if any(len(o.param_groups) != count for o, count in self._groups):
            return "a group of parameters was added to the optimizer"
        if any(list(map(id, now)) != list(map(id, then)) for now, then in self._lists):
            return "parameters joined or left the optimizer"
        return None if _flags() == self._flags else "a setting of torch changed (determinism, precision, cuDNN, attention)"


class Snapshot:
    """Attributes of all modules before a step."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(path, each, _attributes(each)) for path, each in _modules(module)]

    def changes(self) -> list[str]:
        """Names of the attributes that were assigned since, and of lists, dicts and sets that grew or shrank."""
        found = []
        for path, module, before in self._before:
            after = _attributes(module)
            for name in before.keys() | after.keys():
                (old, size), (new, new_size) = before.get(name, (None, 0)), after.get(name, (None, 0))
                if (old is not new and not (isinstance(new, _PLAIN) and old == new)) or size != new_size:
                    found.append(f"{path}.{name}".lstrip("."))
        return sorted(found)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, int]]:
    values = {k: v for k, v in module.__dict__.items() if k not in _IGNORED}
    values |= {k: v for table in _TABLES for k, v in getattr(module, table).items()}
    return {k: (v, len(v) if isinstance(v, list | dict | set) else 0) for k, v in values.items()}
