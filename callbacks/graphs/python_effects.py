"""Finds Python in a step that a graph could not repeat.

These are calls whose results differ from step to step, and numbers computed from ``batch_idx``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torchmetrics.metric
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from .source_lines import Place, user_line

_CHANGES = "is read, and changes while the graph would keep the value of its capture"
_ONCE = "is called, and would be called only once, at the capture"
REMEDY_NUMBER = (
    "Keep the number in a buffer of the module and fill it in `on_train_batch_start`:"
    " `self.weight.fill_(...)`."
)
REMEDY_HOOK = "Move it to `on_train_batch_end`, which gets what `training_step` returns."
RANDOM = (
    f"A random number of Python or numpy {_CHANGES}. Draw it with torch, on the device of the"
    " batch."
)
METRIC = f"A torchmetrics metric is used, and would be updated only once. {REMEDY_HOOK}"


def _code(function: Any) -> CodeType:
    return (function.fget if isinstance(function, property) else function).__code__


_CALLS = {
    _code(LightningModule.global_step): f"`global_step` {_CHANGES}. {REMEDY_NUMBER}",
    _code(LightningModule.current_epoch): f"`current_epoch` {_CHANGES}. {REMEDY_NUMBER}",
    _code(Trainer.global_step): f"`trainer.global_step` {_CHANGES}. {REMEDY_NUMBER}",
    _code(Trainer.current_epoch): f"`trainer.current_epoch` {_CHANGES}. {REMEDY_NUMBER}",
    _code(Trainer.is_last_batch): f"`trainer.is_last_batch` {_CHANGES}. {REMEDY_HOOK}",
    _code(
        LightningModule.logger
    ): f"`self.logger` is used, and would be used only once. Use `self.log`. {REMEDY_HOOK}",
    _code(
        LightningModule.loggers
    ): f"`self.loggers` is used, and would be used only once. Use `self.log`. {REMEDY_HOOK}",
    _code(LightningModule.print): f"`self.print` {_ONCE}. {REMEDY_HOOK}",
    _code(
        LightningModule.log
    ): f"`self.log` of a module in the middle of a graph {_ONCE}. {REMEDY_HOOK}",
    _code(torch.cuda.synchronize): f"`torch.cuda.synchronize` {_ONCE}. Remove it.",
}
_SEEDS = (
    torch.random.set_rng_state,
    torch.random.manual_seed,
    torch.cuda.set_rng_state,
    torch.cuda.manual_seed,
)
_SETS_RANDOM_STATE = tuple(map(_code, _SEEDS))
_METRICS = torchmetrics.metric.__file__
_CLOCKS = (time.time, time.perf_counter, time.monotonic, time.time_ns, time.perf_counter_ns)


def call_problem(code: CodeType, forward: bool) -> str | None:
    """Return why a graph cannot repeat a call of this code in a forward, or else in a backward."""
    if code in _SETS_RANDOM_STATE and forward:
        return f"`torch.{code.co_name}` {_ONCE}. {REMEDY_HOOK}"
    # `nn.Module.parameters()` hashes all modules, metrics too, which updates none of them.
    if code.co_filename == _METRICS and code.co_name != "__hash__":
        return METRIC
    return _CALLS.get(code)


def builtin_problem(function: Any) -> str | None:
    """Return why a graph cannot repeat a call of a function that is written in C."""
    if function is print:
        return f"`print` {_ONCE}. {REMEDY_HOOK}"
    if function in _CLOCKS:
        return f"The time {_CHANGES}. {REMEDY_HOOK}"
    owner = getattr(function, "__self__", None)
    if isinstance(owner, Tensor) and function.__name__ in ("numpy", "tolist"):
        return (
            f"`Tensor.{function.__name__}` reads values on the host: a graph would keep those of"
            f" its capture. {REMEDY_HOOK}"
        )
    return RANDOM if isinstance(owner, random.Random) else None


def plain(value: Any) -> Any:
    """Return a value that stands for ``value`` and equals itself: NaN does not, objects may not."""
    if isinstance(value, WatchedIndex):
        return int.__int__(value)
    if isinstance(value, torch.ScriptObject):
        return None  # a process group, which comes in a new wrapper each time
    return (
        value
        if isinstance(value, int | bool | str | None | torch.dtype | torch.device)
        else repr(value)
    )


class WatchedIndex(int):
    """A ``batch_idx`` that reports each number computed from it.

    Python calls none of its methods where it is the index of a list, the end of a `range`, or on
    the right of a float.
    """

    tell: Callable[[str, Place], None]

    def __new__(cls, value: int, tell: Callable[[str, Place], None]) -> WatchedIndex:  # noqa: D102
        index = super().__new__(cls, value)
        index.tell = tell
        return index


def _telling(name: str) -> Callable[..., Any]:
    def method(self: WatchedIndex, *args: Any) -> Any:
        self.tell(f"`batch_idx` {_CHANGES}. {REMEDY_NUMBER}", user_line())
        return getattr(int, name)(self, *args)

    return method


_ARITHMETIC = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod rdivmod pow"
    " rpow neg pos abs"
)
_BITS = "and rand or ror xor rxor lshift rlshift rshift rrshift invert"
_CONVERSIONS = "eq ne lt le gt ge hash bool int float index round trunc floor ceil str repr format"
for _name in f"{_ARITHMETIC} {_BITS} {_CONVERSIONS}".split():
    setattr(WatchedIndex, f"__{_name}__", _telling(f"__{_name}__"))
for _name in ("bit_count", "bit_length", "conjugate", "to_bytes"):
    setattr(WatchedIndex, _name, _telling(_name))
