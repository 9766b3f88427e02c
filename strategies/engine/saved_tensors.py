"""Tensors in slots that autograd saves for backward.

In backward a slot may hold another unit than in forward. A saved view of a slot is therefore noted
with its unit, and looked up when backward reads it: in the slot if its unit is there, else gathered
into memory of its own. So backward is right by whatever path it reaches a unit (a loss on an
intermediate value, a view changed in place); the hooks on outputs only make it fast.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..residency.apart import apart
from ..residency.functions import replaced
from ..residency.given_out import storage_of
from ..residency.home import ResidencyError, about, describe
from ..residency.resting import NO_GRAPH_TASK, Absent, RestingParameter, graph_task
from .hooks import copy_views, transform
from .transforms import stand_aside
from .unit import Arena, Mark, Phase, Unit

# Tuples: one is made for every saved tensor in every step. Autograd compares versions itself only
# where there are no hooks. Detached, because an output that its own graph holds would live until
# the garbage collector comes.
SavedOther = tuple[Tensor, int]  # not in a slot; its version


class SavedSlot(tuple[Tensor, int, Mark, int]):
    """An alias in a slot, its version, the mark of its unit, version of the unit's weights."""

    __slots__ = ()


_data_ptr, _untyped_storage = Tensor.data_ptr, Tensor.untyped_storage  # torch's own


class SavedTensors:
    """What autograd saves while an engine's units are in use. On a single rank nothing ever moves,
    and nobody watches.
    """

    def __init__(self, units: list[Unit], arena: Arena) -> None:
        self.arena, self._start = arena, arena.memory.data_ptr()
        self._stop = self._start + arena.memory.numel()
        self._outside: list[tuple[Unit, saved_tensors_hooks]] = []
        self.recomputed: list[Unit] = []  # in use because a recomputation saved views of them
        self._slots = {unit.storage: unit for unit in units if not unit.whole}
        self.thread = threading.get_ident()  # of the last step
        if self._slots:
            WATCHING.add(self)
            _watch_others()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around a step: what autograd saves in it is noted."""
        with saved_tensors_hooks(self.pack, unpack) if self._slots else nullcontext():
            yield

    def enter_outside(self, unit: Unit) -> None:
        """``unit`` begins a forward outside of a step, or in another thread: nobody else watches
        what autograd saves.
        """
        # torch.func refuses such hooks, and keeps what it saves to itself.
        if not unit.whole and torch.is_grad_enabled() and transform() is None:
            hooks = saved_tensors_hooks(self.pack, unpack)
            hooks.__enter__()
            self._outside.append((unit, hooks))

    def leave_outside(self, unit: Unit) -> None:
        """The end of what :meth:`enter_outside` began."""
        if self._outside and self._outside[-1][0] is unit:
            self._outside.pop()[1].__exit__()

    def pack(self, tensor: Tensor) -> Tensor | SavedOther | SavedSlot:
        """Autograd saves ``tensor``."""
        if isinstance(tensor, Absent):
            return self._of_resting(tensor)
        try:
            with torch._C.DisableTorchFunction():  # no class and no mode of a user's is asked
                address, storage = _data_ptr(tensor), _untyped_storage(tensor)._cdata
        except RuntimeError:  # has no storage (functorch), or more than one
            return tensor.detach().clone() if self._has_parts(tensor) else tensor
        if not self._start <= address < self._stop:
            held = tensor.detach() if address else self._of_no_memory(tensor)
            return held, held._version
        unit, held = self._slots.get(storage), tensor.detach()
        if unit is None:
            # Of memory in a slot numpy or DLPack has made this tensor, with a storage of its own.
            unit = next(unit for unit in self.arena.holders if address - self._start in unit.region)
            # and lets the array go
            held = held.new_empty(0).set_(
                alias(held, unit.memory, address - unit.memory.data_ptr())
            )
        # In a backward it is what `unpack` has just returned, for a graph of the backward itself.
        if unit.phase is not Phase.IN_USE and (
            unit.phase is Phase.RESTING or graph_task() == NO_GRAPH_TASK
        ):
            if isinstance(tensor._base, RestingParameter):
                raise _unasked(tensor._base)
            raise kept_view(tensor, unit, "is saved for backward")
        return SavedSlot((held, held._version, unit.mark, unit.version))

    def _has_parts(self, tensor: Tensor) -> bool:
        return any(self.unit_of(part) is not None for part in parts_of(tensor))

    def _of_no_memory(self, tensor: Tensor) -> Tensor:
        """What is kept of one that is made of others, or has no elements, and may share a slot's
        storage all the same.
        """
        if self._has_parts(tensor):
            return tensor.detach().clone()
        return tensor.detach() if tensor.numel() else torch.empty_like(tensor, requires_grad=False)

    def _of_resting(self, absent: Tensor) -> Tensor | SavedSlot:
        """A custom Function, or a checkpoint, saves a parameter that rests, or a view of one."""
        if not torch._C._is_torch_function_enabled():
            raise _unasked(absent)
        unit = self.unit_of(absent)
        if unit is None:
            return absent.detach()  # of another engine, which gathers it now or raises
        with torch._C.DisableTorchFunctionSubclass():
            held = absent.detach()
        return SavedSlot((held, held._version, unit.mark, unit.version))

    def unit_of(self, tensor: Tensor) -> Unit | None:
        """In whose slot ``tensor`` lies: a view of weights, or a parameter itself."""
        return self._slots.get(storage_of(tensor)) if tensor.numel() else None

    def in_slot(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of gathered weights (and no parameter itself)."""
        with torch._C.DisableTorchFunctionSubclass():
            try:  # without a call: each forward of a unit asks
                address = _data_ptr(tensor)
            except RuntimeError:
                address = 0
            if not address:
                return self._has_parts(tensor)
            return self._start <= address < self._stop and not isinstance(tensor, nn.Parameter)


def unpack(saved: Tensor | SavedOther | SavedSlot) -> Tensor:
    """Backward reads what :meth:`SavedTensors.pack` returned."""
    if isinstance(saved, Tensor):
        return saved
    held, version = saved[0], saved[1]
    unit = saved[2].unit if type(saved) is SavedSlot else None
    if unit is not None and saved[3] != unit.version:
        for entry in unit.entries_at(held.data_ptr()):
            if entry.changed > saved[3]:
                raise ResidencyError(
                    f"Backward needs parameter {entry.name!r} (unit {unit.name}) as it was in"
                    " forward, but an optimizer step, a load or a `copy_` to it came in between."
                    " Do that after backward (`on_train_batch_end`)."
                )
    if held._version != version:
        entries = () if unit is None else unit.entries_at(held.data_ptr())
        if not any(about(entry.parameter).aliased for entry in entries):
            raise _modified(held, version)
    if unit is None:
        return held
    if unit.phase is not Phase.IN_USE:
        if not unit.nested:
            return copy_of(held, unit)  # whoever reads it may go on to run other units
        held = look_up(held, unit)
    return held.detach()  # whoever keeps it is found when the use ends


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """What a sparse tensor is made of, or one of a class that wraps others (nested,
    ``DTensor``).
    """
    if is_traceable_wrapper_subclass(tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return (
        [tensor._values()]
        if tensor.is_sparse
        else [tensor.values()]
        if tensor.layout in _COMPRESSED
        else []
    )


def kept_view(view: Tensor, unit: Unit, reason: str) -> ResidencyError:
    """What to raise for a ``view`` of a weight of ``unit`` while that is not in use, and the
    ``reason``.
    """
    with torch._C.DisableTorchFunctionSubclass():
        whose = ", ".join(repr(entry.name) for entry in unit.entries_at(view.data_ptr()))
    return ResidencyError(
        f"A view (shape {tuple(view.shape)}) of parameter {whose} (unit {unit.name}) was kept after"
        f" the forward that made it, when its memory belongs to other units, and {reason}. Keep a"
        " copy (`.clone()`), or use the parameter itself."
    )


def look_up(view: Tensor, unit: Unit) -> Tensor:
    """``view`` of the slot of ``unit``, or of a copy if another unit may be there."""
    if unit.phase is Phase.RESTING:
        # Not into the slot: another operand of the same operation may be a view of what is there.
        return alias(view, unit.spilled(), view.data_ptr() - unit.memory.data_ptr())
    if unit.phase is Phase.GATHERING:
        unit.arrive()
    return view


def copy_of(view: Tensor, unit: Unit) -> Tensor:
    """``view`` of the weights of now, in memory of its own; collective if they are not in the
    slot.
    """
    with apart(), torch._C.DisableTorchFunctionSubclass():
        found = look_up(view, unit)
        return found.clone() if found is view else found


def alias(view: Tensor, memory: Tensor, offset: int) -> Tensor:
    """One like ``view`` at ``offset`` [bytes] of ``memory``."""
    there = memory.view(view.dtype).as_strided(view.shape, view.stride(), offset // view.itemsize)
    there = there.conj() if view.is_conj() else there
    return torch._neg_view(there) if view.is_neg() else there


def _modified(held: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace"
        f" operation: [{held.dtype}, shape {tuple(held.shape)}] is at version {held._version};"
        f" expected version {version} instead. Find it with"
        " torch.autograd.set_detect_anomaly(True)."
    )


def _unasked(absent: Tensor) -> ResidencyError:
    by = (
        "by a `__torch_function__` that calls functions with what it was given, or as torch.func"
        " has saved it"
    )
    if not isinstance(absent, RestingParameter):
        return kept_view(absent, unit_of(absent), f"is read {by}")
    return ResidencyError(
        f"The memory of parameter {describe(absent)} was read while it is sharded over the ranks,"
        f" {by}. Give them a copy (`parameter.clone()`)."
    )


# ---- hooks of the user's own, which autograd asks instead ----------------------------------------

WATCHING: WeakSet[SavedTensors] = WeakSet()


@cache
def _watch_others() -> None:
    enter = saved_tensors_hooks.__enter__

    @wraps(enter)
    def enter_sheltered(self: saved_tensors_hooks) -> None:
        pack, module = self.pack_hook, getattr(self.pack_hook, "__module__", "") or ""
        if not WATCHING or module.partition(".")[0] == __name__.partition(".")[0]:
            pass  # our own, of captured graphs too
        elif module != "torch.utils.checkpoint":
            self.pack_hook, self.unpack_hook = _shelter(pack, self.unpack_hook)
        elif "recomputation" in type(self).__name__:  # else it keeps nothing
            self.pack_hook = lambda tensor: pack(_lasting(tensor))
        enter(self)

    saved_tensors_hooks.__enter__ = enter_sheltered  # type: ignore[method-assign]
    stand_aside(WATCHING, _watcher)
    for name in ("apply", "apply_boxed"):  # the second since torch 2.13
        if hasattr(BackwardCFunction, name):
            setattr(BackwardCFunction, name, _with_own_gradients(getattr(BackwardCFunction, name)))


def _watcher(pack: Callable) -> SavedTensors | bool:
    """Whose hook it is, if it is one of ours: True, of any engine that has what is saved."""
    return pack is _pack_any or (
        isinstance(owner := getattr(pack, "__self__", None), SavedTensors) and owner
    )


def unit_of(tensor: Tensor) -> Unit | None:
    """In whose slot ``tensor`` lies, of all engines."""
    return next((unit for saved in WATCHING if (unit := saved.unit_of(tensor)) is not None), None)


def _with_own_gradients(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """A custom Function's backward. Gradients that are views of weights are copied: others may have
    that memory soon.
    """

    @wraps(run_backward)
    def run_with_own(ctx: BackwardCFunction, *grads: Any) -> Any:
        result = run_backward(ctx, *grads)
        return copy_views(result, lambda grad: unit_of(grad) is not None)[0] if WATCHING else result

    return run_with_own


def _pack_any(tensor: Tensor) -> SavedOther | SavedSlot:
    for saved in WATCHING:
        if saved.unit_of(tensor) is not None:
            return saved.pack(tensor)
    held = tensor.detach()
    return held, held._version


def _lasting(tensor: Tensor) -> Tensor:
    """What a recomputation may save of ``tensor``: itself, or a copy of weights whose unit's
    backward may be over before.
    """
    unit = unit_of(tensor)
    # see backward.py
    held = not isinstance(tensor, RestingParameter) and any(
        unit in saved.recomputed for saved in WATCHING
    )
    if unit is None or held:
        return tensor
    with apart():
        return tensor.detach().clone()


def run_watched(
    run_backward: Callable[..., Any],
    outputs: Any,
    grads: Any,
    keep_graph: bool,
    create_graph: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Autograd's run, whose own graph (``create_graph``) is watched where no step does it: outside,
    or in another thread.
    """
    watched = (
        not (create_graph and WATCHING)
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )
    # torch.func refuses such hooks, and keeps what it saves to itself.
    grads = replaced(grads, Absent, torch.clone)  # the C++ engine asks no classes
    with (
        nullcontext()
        if watched or transform() is not None
        else saved_tensors_hooks(_pack_any, unpack)
    ):
        return run_backward(outputs, grads, keep_graph, create_graph, *args, **kwargs)


def _shelter(
    pack: Callable[[Tensor], Any], unpack_other: Callable[[Any], Tensor]
) -> tuple[Callable, Callable]:
    """Hooks like these, but what they keep of a slot is looked up when backward reads it, or a copy
    if it is in a container.
    """

    def pack_place(tensor: Tensor) -> Any:
        packed = pack(tensor)
        if unit_of(tensor) is None:
            return packed
        if isinstance(packed, Tensor):
            return packed if unit_of(packed) is None else _pack_any(packed)
        return copy_views(packed, lambda inside: unit_of(inside) is not None)[0]

    def unpack_place(packed: Any) -> Tensor:
        found = unpack_other(unpack(packed) if type(packed) is SavedSlot else packed)
        unit = unit_of(found)  # if it has kept a view by itself
        with torch._C.DisableTorchFunctionSubclass():
            return found if unit is None or unit.phase is Phase.IN_USE else look_up(found, unit)

    return pack_place, unpack_place
