"""The hooks on modules, parameters and outputs."""

from __future__ import annotations

import os
import re
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..residency.functions import instances
from ..residency.resting import set_grad
from .shards import Entry
from .unit import Unit

# of the torch.func transform that runs, if any; dynamo can tell it
transform = torch._C._functorch.maybe_current_level
Collector = Callable[[Tensor], None]
_register_hook = Tensor.register_hook  # torch's own: each forward calls it
_NOT_USER_CODE = tuple(
    os.path.join(os.path.dirname(file), "") for file in (torch.__file__, os.path.dirname(__file__))
)


def install(
    unit: Unit,
    enter_forward: Callable[[Unit, nn.Module, Any], None],
    leave_forward: Callable[[Unit, nn.Module, Any, Any], Any],
    collector: Callable[[Unit, int], Collector],
    dropped: list[str],
) -> list[RemovableHandle]:
    """Report when members of the unit run, when they have run or raised (then outputs are None),
    and their gradients.

    ``leave_forward`` returns what replaces the outputs, if not None. ``collector`` makes the hook
    of a trained parameter; ``dropped`` gets the name of the first parameter that has a gradient and
    no optimizer.
    """
    _script_copies()
    enter, leave = _outside_of_graphs(enter_forward), _outside_of_graphs(leave_forward)
    handles = []
    for module in unit.members:
        # First in, last out: the user's own hooks find ordinary parameters.
        handles.append(module.register_forward_pre_hook(_ModuleHook(enter, unit), prepend=True))
        # Also when forward raises, or stops early in a checkpoint's recomputation.
        handles.append(module.register_forward_hook(_ModuleHook(leave, unit), always_call=True))
    handles += _watch_autocast(unit)
    # On a single rank such gradients are where the parameters are.
    others = [
        e
        for e in unit.entries
        if not (e.trained or unit.whole) and (e.dtype.is_floating_point or e.dtype.is_complex)
    ]
    handles += [
        _on_grad(entry.parameter, collector(unit, index))
        for index, entry in enumerate(unit.trained)
    ]
    return handles + [_on_grad(entry.parameter, _dropper(entry, dropped)) for entry in others]


def _outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Before ``function`` the graph of a compiled module ends. Where nothing is compiled it is
    called at once.

    That is `torch.compiler.disable`, which would take two more calls in each forward of a unit.
    """
    disabled, compiles = (
        torch.compiler.disable(function),
        torch._C._dynamo.eval_frame.get_eval_frame_callback,
    )

    @torch._dynamo.decorators.skip
    def call(*args: Any) -> Any:
        return function(*args) if compiles() is None else disabled(*args)

    return call


def _on_grad(parameter: nn.Parameter, hook: Collector) -> RemovableHandle:
    # torch refuses hooks on what needs no gradient now, but the user may unfreeze it later.
    hook.takes_gradient = True  # see keep_engine_last: the user's hooks run before it
    needs_grad = parameter.requires_grad
    handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(needs_grad)
    return handle


def _watch_autocast(unit: Unit) -> list[RemovableHandle]:
    """Give modules whose weights are gathered for autocast, in its dtype, the full precision where
    that does not hold.
    """
    chunks = [chunk for chunk in unit.chunks if chunk.dtype != chunk.master_dtype]
    lower = {id(e.parameter): (e, chunk.dtype) for chunk in chunks for e in chunk.entries}
    handles = []
    for module in dict.fromkeys(m for member in unit.members for m in member.modules()):
        found = [lower[id(p)] for p in module._parameters.values() if id(p) in lower]
        if found:
            handles.append(
                module.register_forward_pre_hook(
                    _full_precision(unit, [e for e, _ in found], found[0][1])
                )
            )
    return handles


def _full_precision(unit: Unit, entries: list[Entry], dtype: torch.dtype) -> Callable[..., None]:
    device = entries[0].parameter.device.type
    pattern = re.sub(r"\d+", "*", entries[0].name.rpartition(".")[0])

    @torch.compiler.disable
    def lift() -> None:
        if unit.spread is not None or not unit.pins:
            return  # reads are of full values already
        if torch.is_grad_enabled():  # in every step, not now and then in an evaluation
            warnings.warn(
                f"Module {pattern!r} runs where autocast is off or not {dtype}: its unit"
                f" {unit.name} is gathered once more, in full precision. If it does so in each"
                f" step, `Zero3Strategy(keep_in_fp32=[{pattern!r}])` saves that.",
                stacklevel=_users_level(),
            )
        unit.lifted.add(entries)

    def hook(module: nn.Module, args: Any) -> None:
        # vmap does without autocast, whatever is enabled
        if (
            not torch.is_autocast_enabled(device)
            or torch.get_autocast_dtype(device) != dtype
            or transform() is not None
        ):
            lift()

    return _ModuleHook(hook)


def _users_level() -> int:
    """`stacklevel` of the innermost line that is neither torch's nor this package's: where a module
    is called.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_USER_CODE):
        frame, level = frame.f_back, level + 1
    return level


class _ModuleHook(partial):
    """A function that stays behind when its module is copied or pickled: the copy is nobody's
    unit.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _ModuleHook, (_nothing,)


def _nothing(*args: Any) -> None:
    """In place of a hook."""


@cache
def _script_copies() -> None:
    """`torch.jit.script` compiles a module's hooks, and what it makes shares the parameters: it
    gets a copy without ours.
    """
    create = torch.jit._recursive.create_script_module

    @wraps(create)
    def create_of_copy(
        module: nn.Module, stubs: Any, share_types: bool = True, is_tracing: bool = False
    ) -> Any:
        return create(
            module if is_tracing else _without_hooks(module), stubs, share_types, is_tracing
        )

    torch.jit._recursive.create_script_module = create_of_copy


_COPIED = frozenset({"_parameters", "_buffers", "_modules"})


def _without_hooks(module: nn.Module) -> nn.Module:
    """A copy of ``module``, its parameters and buffers, if any in it has hooks of an engine."""
    tables = [
        (vars(m), name)
        for m in module.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks")
    ]
    found = [
        (table, name, table[name])
        for table, name in tables
        if _ModuleHook in map(type, table.get(name, {}).values())
    ]
    if not found:
        return module
    try:
        for table, name, hooks in found:
            table[name] = OrderedDict(
                (key, hook) for key, hook in hooks.items() if type(hook) is not _ModuleHook
            )
        return deepcopy(module, {id(value): value for value in _not_copied(module)})
    finally:
        for table, name, hooks in found:
            table[name] = hooks


def _not_copied(module: nn.Module) -> Iterator[Any]:
    """Attributes of modules that have no modules, parameters or buffers in them: `deepcopy` refuses
    locks and activations.
    """
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    for value in (
        value for m in module.modules() for key, value in vars(m).items() if key not in _COPIED
    ):
        if not (instances(value, nn.Module) or own.intersection(map(id, instances(value, Tensor)))):
            yield value


def _dropper(entry: Entry, dropped: list[str]) -> Collector:
    """Takes away the gradient of a parameter that no optimizer has: it would pile up, whole, on
    every rank.
    """

    # torch keeps hooks where the garbage collector cannot look
    name, get_entry = (
        entry.name,
        weakref.ref(entry),
    )

    def drop(parameter: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            set_grad(parameter, None)
        if (now := get_entry()) is not None:
            now.dropped = True
        if not dropped:
            dropped.append(name)
            warnings.warn(
                f"Parameter {name!r} (and perhaps others) has a gradient and no optimizer: it is"
                " not kept, and reading `parameter.grad` is an error. Give it to an optimizer (a"
                " learning rate of 0 will do), or freeze it.",
                stacklevel=2,
            )

    return drop


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
            if len(hooks := tensor._backward_hooks) > 1:
                for key in tuple(hooks)[:-1]:
                    hooks[key] = hooks.pop(key)
    return found


def copy_views(
    outputs: Any,
    in_slot: Callable[[Tensor], bool],
    copied: Callable[[Tensor], Tensor] = Tensor.clone,
) -> tuple[Any, list[Tensor]]:
    """``outputs`` with copies of the views of weights in it, whose memory another unit may take;
    and these views.
    """
    if isinstance(outputs, Tensor):  # most are
        return (copied(outputs), [outputs]) if in_slot(outputs) else (outputs, [])
    views = [tensor for tensor in instances(outputs, Tensor) if in_slot(tensor)]
    return (
        _replace(outputs, lambda tensor: copied(tensor) if in_slot(tensor) else tensor)
        if views
        else outputs
    ), views


def _replace(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            value[key] = _replace(item, change)
    elif isinstance(value, tuple):
        items = [_replace(item, change) for item in value]
        if any(now is not before for now, before in zip(items, value, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            object.__setattr__(value, f.name, _replace(getattr(value, f.name, None), change))
    return value
