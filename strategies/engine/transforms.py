"""Transforms of torch.func that differentiate (grad, vjp, jacrev, hessian), in a step and
elsewhere.

Torch refuses saved-tensor hooks in them, so that what they save of weights is not looked up when a
backward reads it, as in saved_tensors.py: it must stay as it is. Our hooks stand aside while one
runs, and all parameters rest, which makes each read a copy. So nothing that is saved meanwhile
changes, neither for the transform's backward nor for that of the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from .unit import Unit

# None: they are not, in this thread
hooks_refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


class _Transform(threading.local):
    """The outermost one that runs in this thread."""

    hooks: list[tuple[Callable, Callable]]  # ours that stand aside
    units: list[Unit]  # that were in use when it began
    # whose uses or forwards are open, and `Unit.spread` before
    spread: list[tuple[Unit, dict[str, Tensor] | None]]

    def __init__(self) -> None:
        self.hooks, self.units, self.spread = [], [], []


_transform = _Transform()


def enter_transformed(unit: Unit) -> None:
    """``unit`` begins a forward: until its end reads of its weights are copies of what is gathered
    here; collective.
    """
    _transform.spread.append((unit, unit.spread))
    if unit.spread is None and not unit.lent:
        unit.spread = unit.values()


def leave_transformed(unit: Unit | None) -> None:
    """The end of what :func:`enter_transformed` began, and of all that began later; None: of
    all.
    """
    if unit is None or any(each is unit for each, _ in _transform.spread):
        left = None
        while _transform.spread and (left is None or left is not unit):
            left, left.spread = _transform.spread.pop()


def stand_aside(watching: Iterable[Any], watcher: Callable[[Callable], Any]) -> None:
    """From here on, in this process. ``watcher`` tells which of ``watching`` a pack hook is of;
    False: it is the user's.
    """
    autograd, now = torch._C._autograd, _transform
    refuse, allow = autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable

    @wraps(refuse)
    def refuse_others(message: str, *args: Any) -> None:
        if not message.startswith("torch.func") or hooks_refused() is not None:
            return refuse(message, *args)
        while (hooks := autograd._top_saved_tensors_default_hooks(True)) is not None and watcher(
            hooks[0]
        ):
            now.hooks.append(hooks)
            autograd._pop_saved_tensors_default_hooks()
        refuse(message, *args)  # the user's are an error
        if not torch._guards.TracingContext.try_get():  # torch.compile traces without values
            here, found = threading.get_ident(), [watcher(pack) for pack, _ in now.hooks]
            for unit in [
                u
                for saved in watching
                if saved.thread == here or saved in found
                for u in saved.arena.in_use
            ]:
                unit.keep_written()
                enter_transformed(unit)
                unit.rest()
                now.units.append(unit)

    @wraps(allow)
    def allow_again() -> None:
        allow()
        leave_transformed(None)
        while now.units:
            now.units.pop().go_on()
        while now.hooks:
            autograd._push_saved_tensors_default_hooks(*now.hooks.pop())

    autograd._saved_tensors_hooks_disable, autograd._saved_tensors_hooks_enable = (
        refuse_others,
        allow_again,
    )
