"""The hooks on modules, parameters and outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .chunk import Entry
from .torch_functions import instances
from .unit import Unit

Collector = Callable[[Tensor], None]
_register_hook = Tensor.register_hook  # torch's own: each forward calls it


def install(
    unit: Unit,
    enter_forward: Callable[[Unit, nn.Module, Any], None],
    leave_forward: Callable[[Unit, nn.Module, Any, Any], None],
) -> list[RemovableHandle]:
    """Report when members of the unit run, and when they have run or raised (outputs are None)."""
    # before them the graph of a compiled module ends
    enter, leave = torch.compiler.disable(enter_forward), torch.compiler.disable(leave_forward)
    handles = []
    for module in unit.members:
        # First in, last out: the user's own hooks find ordinary parameters.
        handles.append(module.register_forward_pre_hook(ModuleHook(enter, unit), prepend=True))
        # Also when forward raises, or stops early in a checkpoint's recomputation.
        handles.append(module.register_forward_hook(ModuleHook(leave, unit), always_call=True))
    return handles


def take_gradients(
    unit: Unit, collector: Callable[[Unit, Entry], Collector]
) -> list[RemovableHandle]:
    """Take the gradients of the unit's parameters as soon as autograd has them; ``collector`` makes
    the hook of each.
    """
    return [
        _on_grad(entry.parameter, collector(unit, entry))
        for entry in unit.entries
        if entry.dtype.is_floating_point or entry.dtype.is_complex
    ]


def _on_grad(parameter: nn.Parameter, hook: Collector) -> RemovableHandle:
    # torch refuses hooks on what needs no gradient now, but the user may unfreeze it later.
    hook.takes_gradient = True  # type: ignore[attr-defined]  # see keep_engine_last: the user's hooks run before it
    needs_grad = parameter.requires_grad
    handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(needs_grad)
    return handle


class ModuleHook(partial):
    """A function that stays behind when its module is copied or pickled: the copy is nobody's
    unit.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return ModuleHook, (_nothing,)


def _nothing(*args: Any) -> None:
    """In place of a hook."""


def watch_outputs(unit: Unit, outputs: Any, enter_backward: Callable[[Unit, Tensor], None]) -> bool:
    """Call ``enter_backward(unit, grad)`` when a tensor in ``outputs`` has its gradient; whether
    any of them needs one.
    """
    hook = partial(enter_backward, unit)
    found = False
    for tensor in (outputs,) if isinstance(outputs, Tensor) else instances(outputs, Tensor):
        # a hook on a parameter would stay there, one more in each step
        if tensor.grad_fn is not None:
            _register_hook(tensor, hook)
            found = True
            # an earlier unit's output, passed on: its turn is after this one's
            hooks: Any = tensor._backward_hooks
            if len(hooks) > 1:
                for key in tuple(hooks)[:-1]:
                    hooks[key] = hooks.pop(key)
    return found
