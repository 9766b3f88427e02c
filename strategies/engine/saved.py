"""Tensors in slots that autograd saves for backward.

In backward a slot may hold another unit than in forward. A saved view of a slot is therefore noted as a place, and looked up
when backward reads it: in the slot if its unit is there, else gathered into memory of its own. So backward is right by whatever
path it reaches a unit (a loss on an intermediate value, a view changed in place); the hooks on outputs only make it fast.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial, wraps
from traceback import walk_tb
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version, saved_tensors_hooks

from ..residency.home import Home
from ..residency.resting import NO_GRAPH_TASK, ResidencyError, RestingParameter, describe, graph_task, home_of, is_aliased
from .hooks import copy_views, transform
from .kept import kept_view
from .unit import Arena, Phase, Unit, apart

# Bare tuples: one is made for every saved tensor in every step. Autograd compares versions itself only where there are no
# hooks. Detached, because an output that its own graph holds would live until the garbage collector comes.
SavedOther = tuple[Tensor, int]  # not in a slot; its version
SavedSlot = tuple[Tensor, int, Unit, int]  # an alias in the slot, its version, unit, version of the unit's weights

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class SavedTensors:
    """Pack and unpack hooks for ``torch.autograd.graph.saved_tensors_hooks``."""

    home: Home  # of the parameters: those of another engine, which may have taken some over, are none of ours

    def __init__(self, units: list[Unit], arena: Arena) -> None:
        self._units, self._arena = units, arena
        self._start = arena.memory.data_ptr()
        self._stop = self._start + arena.memory.numel()
        self._spilled: tuple[Unit, Tensor] | None = None
        self._outside: list[tuple[Unit, saved_tensors_hooks]] = []
        self.recomputed: list[Unit] = []  # in use because a recomputation saved views of them
        if self._stop - self._start:
            WATCHING.add(self)
            _watch_others()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around a step: what autograd saves in it is noted. A torch.func transform that differentiates inside is an error."""
        if not self._stop - self._start:
            yield  # a single rank: nothing ever moves
            return
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise ResidencyError(
                "torch.func transforms that differentiate (grad, vjp, jacrev, hessian) cannot run in a step, as in "
                f"`{_caller(error)}`: weights that autograd saves there are looked up later, which torch.func does not allow. "
                "Use torch.autograd.grad or torch.autograd.functional, or run the transform outside of a step in `with "
                "strategy.gathered(module):`."
            ) from error

    def enter_outside(self, unit: Unit) -> None:
        """``unit`` begins a forward outside of a step, or in another thread: nobody else watches what autograd saves."""
        # torch.func refuses such hooks, and keeps what it saves to itself.
        if not unit.whole and torch.is_grad_enabled() and transform() is None:
            hooks = saved_tensors_hooks(self.pack, self.unpack)
            hooks.__enter__()
            self._outside.append((unit, hooks))

    def leave_outside(self, unit: Unit) -> None:
        """The end of what :meth:`enter_outside` began."""
        if self._outside and self._outside[-1][0] is unit:
            self._outside.pop()[1].__exit__()

    def forget(self) -> None:
        """Free the memory of what was gathered for a single read."""
        self._spilled = None

    def pack(self, tensor: Tensor) -> Tensor | SavedOther | SavedSlot:
        """Autograd saves ``tensor``."""
        if type(tensor) is RestingParameter:
            return self._of_resting(tensor)
        try:
            with torch._C.DisableTorchFunctionSubclass():  # a user's class is not asked
                address = tensor.data_ptr()
        except RuntimeError:  # has no storage (functorch), or more than one
            values = tensor._values() if tensor.is_sparse else tensor.values() if tensor.layout in _COMPRESSED else None
            return tensor if values is None or not self.covers(values) else tensor.detach().clone()
        if not self._start <= address < self._stop:
            held = tensor.detach()
            return held, held._version
        offset = address - self._start
        kept = type(tensor._base) is RestingParameter  # a view of one that rests, whoever is in its place now
        if kept:
            _require_asked(tensor._base)
        # In a backward it is what `unpack` has just returned, for a graph of the backward itself.
        for unit in self._arena.in_use if graph_task() == NO_GRAPH_TASK else self._arena.holders:
            if offset in unit.region and not kept:
                held = tensor.detach()
                return held, held._version, unit, unit.version
        raise kept_view(tensor, self._start, self._units)

    def _of_resting(self, parameter: RestingParameter) -> Tensor | SavedSlot:
        """A custom Function saves a parameter that rests."""
        _require_asked(parameter)
        if not self.covers(parameter):
            return parameter.detach()  # of another engine, which gathers it now or raises
        with torch._C.DisableTorchFunctionSubclass():
            held = parameter.detach()
        unit = next(unit for unit in self._units if any(entry.parameter is parameter for entry in unit.entries))
        return held, held._version, unit, unit.version

    def covers(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies in a slot: a view of gathered weights, or a parameter itself."""
        if type(tensor) is RestingParameter:
            return home_of(tensor) is self.home
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return self._start <= tensor.data_ptr() < self._stop
            except RuntimeError:
                return False

    def is_held(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, in a slot, stays there until its unit's backward is over; see backward.py."""
        resting = type(tensor) is RestingParameter
        return not resting and any(tensor.data_ptr() - self._start in unit.region for unit in self.recomputed)

    def in_slot(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a view of gathered weights (and no parameter itself)."""
        with torch._C.DisableTorchFunctionSubclass():
            try:  # as in `covers`, without a call: each forward of a unit asks
                return self._start <= tensor.data_ptr() < self._stop and not isinstance(tensor, nn.Parameter)
            except RuntimeError:
                return False

    def unpack(self, saved: Tensor | SavedOther | SavedSlot) -> Tensor:
        """Backward reads what :meth:`pack` returned."""
        if type(saved) is not tuple:
            return saved
        held, version = saved[0], saved[1]
        unit = saved[2] if len(saved) == 4 else None
        if unit is not None and saved[3] != unit.version:
            for entry in unit.entries_at(held.data_ptr()):
                if entry.changed > saved[3]:
                    raise ResidencyError(
                        f"Backward needs parameter {entry.name!r} (unit {unit.name}) as it was in forward, but an optimizer "
                        "step, a load or a `copy_` to it came in between. Do that after backward (`on_train_batch_end`)."
                    )
        if held._version != version:
            entries = () if unit is None else unit.entries_at(held.data_ptr())
            if not any(is_aliased(entry.parameter) for entry in entries):
                raise _modified(held, version)
        if unit is None:
            return held
        held = held if unit.phase is Phase.IN_USE else self.look_up(held, unit)
        if READER.held is not None and READER.task == graph_task():
            hold(unit)
            return held.detach()  # the user may keep it, and it would be noted
        return held

    def look_up(self, view: Tensor, unit: Unit) -> Tensor:
        """``view`` of the slot of ``unit``, or of a copy if another unit may be there."""
        if unit.phase is Phase.RESTING:
            # Not into the slot: another operand of the same operation may be a view of what is there.
            if self._spilled is None or self._spilled[0] is not unit:
                self._spilled = unit, unit.copy_of_slot()
            return _alias(view, self._spilled[1], view.data_ptr() - self._start - unit.region.start)
        if unit.phase is Phase.GATHERING:
            unit.arrive()
        return view

    def unit_of(self, view: Tensor) -> Unit | None:
        """Whose weights are where ``view`` lies."""
        offset = view.data_ptr() - self._start
        return next((unit for unit in self._arena.holders if offset in unit.region), None)

    def of_another(self, view: Tensor, unit: Unit) -> bool:
        """Whether ``view``, in the region of ``unit``, was made of a parameter of another one: they count writes together."""
        if any(_count_together(view, entry.parameter) for entry in unit.entries_at(view.data_ptr())):
            return False
        return any(
            _count_together(view, entry.parameter) for other in self._units if other is not unit for entry in other.entries
        )

    def at(self, address: int, view: Tensor) -> Tensor:
        """One like ``view`` in a slot."""
        return _alias(view, self._arena.memory, address - self._start)

    def busy(self) -> list[Unit]:
        """Units in use whose memory others take when they are not."""
        return [unit for unit in self._arena.in_use if not unit.root and not unit.nested]

    def refusal(self, view: Tensor) -> ResidencyError:
        """What to raise for a ``view`` in a slot of which nobody knows whose weights it shows."""
        return kept_view(view, self._start, self._units)


def _count_together(view: Tensor, parameter: Tensor) -> bool:
    if view.is_inference():
        return False  # it counts none
    before = view._version
    with torch.autograd._unsafe_preserve_version_counter(parameter):
        increment_version(parameter)
        return view._version != before


def _alias(view: Tensor, memory: Tensor, offset: int) -> Tensor:
    """One like ``view`` at ``offset`` [bytes] of ``memory``."""
    alias = memory.view(view.dtype).as_strided(view.shape, view.stride(), offset // view.itemsize)
    alias = alias.conj() if view.is_conj() else alias
    return torch._neg_view(alias) if view.is_neg() else alias


class _Reader(threading.local):
    """The innermost Python code that a backward runs in this thread: what it has read stays where it is until it is over."""

    task = NO_GRAPH_TASK  # another one is a backward inside of that code, whose nodes do not keep what they read
    held: list[Unit] | None = None  # units that it has read


READER = _Reader()


class Reading:
    """Around Python code that a backward runs, and that may run modules, or a backward, before it is through with a value."""

    def __enter__(self) -> None:
        self._before = READER.task, READER.held
        READER.task, READER.held = graph_task(), []

    def __exit__(self, *raised: Any) -> None:
        held: list[Unit] = READER.held  # type: ignore[assignment]
        READER.task, READER.held = self._before
        for unit in held:
            if unit.pins:  # else an exception has ended all uses
                unit.unuse()


def hold(unit: Unit | None) -> None:
    """The code that runs has read a value of ``unit``, or may."""
    if unit is not None and unit.phase is not Phase.RESTING and not unit.lent and unit not in READER.held:
        unit.use()
        READER.held.append(unit)


def _modified(held: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{held.dtype}, shape {tuple(held.shape)}] is at version {held._version}; expected version {version} "
        "instead. Find it with torch.autograd.set_detect_anomaly(True)."
    )


def _caller(error: Exception) -> str:
    """The function that called the torch.func transform in which ``error`` was raised."""
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    inside = [place for place, code in enumerate(codes) if "_functorch" in code.co_filename]
    return codes[inside[0] - 1 if inside else -1].co_name


def _require_asked(parameter: Tensor) -> None:
    if not torch._C._is_torch_function_enabled():
        raise ResidencyError(
            f"The memory of parameter {describe(parameter)} was read while it is sharded over the ranks, by a "
            "`__torch_function__` that calls functions with what it was given. Give them a copy (`parameter.clone()`)."
        )


# ---- hooks of the user's own, which autograd asks instead ----------------------------------------

WATCHING: WeakSet[SavedTensors] = WeakSet()


class _Kept(partial):
    """Called in backward, it looks up what the user's hook kept of a slot."""


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
    torch.autograd._engine_run_backward = _watched(torch.autograd._engine_run_backward)  # what all ways to a backward call


def owner_of(tensor: Tensor) -> SavedTensors | None:
    """Who has ``tensor`` in a slot."""
    return next((saved for saved in WATCHING if saved.covers(tensor)), None)


def _note_place(tensor: Tensor) -> _Kept:
    owner = owner_of(tensor)
    return _Kept(owner.unpack, owner.pack(tensor))


def _lasting(tensor: Tensor) -> Tensor:
    """What a recomputation may save of ``tensor``: itself, or a copy of weights whose unit's backward may be over before."""
    owner = owner_of(tensor)
    if owner is None or owner.is_held(tensor):
        return tensor
    with apart():
        return tensor.detach().clone()


def _watched(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """``run_backward``, whose own graph (``create_graph``) is watched where no step does it: outside, or in another thread."""

    @wraps(run_backward)
    def run_watched(outputs: Any, grads: Any, keep_graph: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
        watched = not (create_graph and WATCHING) or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        # torch.func refuses such hooks, and keeps what it saves to itself.
        with nullcontext() if watched or transform() is not None else saved_tensors_hooks(_pack_any, _unpack_any):
            return run_backward(outputs, grads, keep_graph, create_graph, *args, **kwargs)

    return run_watched


def _pack_any(tensor: Tensor) -> _Kept | SavedOther:
    if owner_of(tensor) is not None:
        return _note_place(tensor)
    held = tensor.detach()
    return held, held._version


def _unpack_any(packed: _Kept | SavedOther) -> Tensor:
    if type(packed) is _Kept:
        return packed()
    held, version = packed
    if held._version != version:  # autograd compares versions itself only where there are no hooks
        raise _modified(held, version)
    return held


def _shelter(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> tuple[Callable, Callable]:
    """Hooks like these, but what they keep of a slot is looked up when backward reads it, or a copy if it is in a container."""

    def pack_place(tensor: Tensor) -> Any:
        owner, packed = owner_of(tensor), pack(tensor)
        if owner is None:
            return packed
        if isinstance(packed, Tensor):
            return _note_place(packed) if owner.covers(packed) else packed
        copied = copy_views(packed, owner.covers)
        return packed if copied is None else copied

    return pack_place, lambda packed: unpack(packed() if type(packed) is _Kept else packed)
