"""Views of weights that a graph holds past autograd: on the ``ctx`` of custom Functions, in closures of checkpoints.

They are noted when forward is over, like tensors that autograd saves (saved.py). While their unit is not in use nobody can read
them (kept.py); the backward that may need them makes them show the weights of now, whatever container they are in. What makes a
context or a checkpoint, and what runs it in backward, is wrapped once for a process.
"""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from types import BuiltinMethodType, CellType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, Function, _SingleLevelFunction
from torch.utils.checkpoint import _checkpoint_hook, _CheckpointFrame

from .hooks import copy_views
from .kept import Place, place_of
from .saved import WATCHING, Reading, hold, kept_view, unit_of
from .unit import Phase, Unit

_NOTES = "_zero3_notes"  # on a ctx: the units whose forward made it, and the places of views that it holds
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType, partial, MethodType, BuiltinMethodType, SimpleNamespace)
_ATOMS = frozenset({type, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_NEVER = (type, ModuleType, FrameType, nn.Module)  # too much hangs on them, and graphs' views are not in there
_PACKAGE = __name__.partition(".")[0]
_MOST = 1_000  # objects that are gone through for a view in any of them
_thread = threading.local()  # its `contexts`: of Functions that run, the innermost last; None until torch has made it


@cache
def watch_contexts() -> None:
    """From now on, for the engines of this process."""
    BackwardCFunction.__init__ = _remember
    _SingleLevelFunction.apply = classmethod(_apply)
    for name in ("apply", "apply_boxed"):  # the second since torch 2.13
        if hasattr(BackwardCFunction, name):
            setattr(BackwardCFunction, name, _with_places(getattr(BackwardCFunction, name)))
    _checkpoint_hook.__init__ = _with_frame(_checkpoint_hook.__init__)
    _checkpoint_hook.__exit__ = _leave_checkpoint


def _contexts() -> list[BackwardCFunction | None]:
    return _thread.__dict__.setdefault("contexts", [])


def _remember(ctx: BackwardCFunction) -> None:
    """``BackwardCFunction.__init__``: torch makes a context, and shows it to nobody but the Function."""
    contexts = _contexts()
    if contexts and contexts[-1] is None:
        contexts[-1] = ctx


def _apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    """What ``Function.apply`` calls. Views of weights that forward leaves on ``ctx`` are noted."""
    contexts = _contexts()
    contexts.append(None)
    try:
        result = super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]
    finally:
        ctx = contexts.pop()
    if ctx is not None and WATCHING and torch.is_grad_enabled():
        vars(ctx)[_NOTES] = [unit for saved in WATCHING for unit in saved.busy()], _note(vars(ctx))
    return result


# ---- noted in forward ----------------------------------------------------------------------------


def _note(holder: Any, anything: bool = False) -> list[Place]:
    """The places of views in there that show weights now; one that was kept from another forward is an error."""
    with torch._C.DisableTorchFunctionSubclass():
        places = [place or _new_place(view, unit) for view, place, unit in _views_in(holder, anything)]
    return [place for place in places if place.moved or place.unit.pins]  # the others are another graph's, and cannot be read


def _views_in(holder: Any, anything: bool = False) -> list[tuple[Tensor, Place | None, Unit]]:
    """Views of weights in there, where they are if that is noted, and whose."""
    found = [(view, place_of(view)) for view in _walk(holder, anything) if not isinstance(view, nn.Parameter)]
    units = [unit_of(view) if place is None else place.unit for view, place in found]
    return [(*each, unit) for each, unit in zip(found, units, strict=True) if unit is not None]


def _new_place(view: Tensor, unit: Unit) -> Place:
    if not unit.pins:
        raise kept_view(view, unit)
    return Place(view, unit)


# ---- looked up in backward -----------------------------------------------------------------------


class _LookedUp(Reading):
    """Inside, ``units`` stay in their slots if they are there, and views in ``places`` show the weights of now."""

    def __init__(self, units: Iterable[Unit], places: Iterable[Place]) -> None:
        self._units, self._places = units, places
        self._moved: list[Place] = []

    def __enter__(self) -> None:
        super().__enter__()
        for unit in self._units:
            hold(unit)
        try:
            for place in self._places:
                if place.look_up():
                    self._moved.append(place)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *raised: Any) -> None:
        for place in self._moved:
            place.put_back()
        super().__exit__(*raised)


def _with_places(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """A Function's backward, which finds in what its forward left on ``ctx``, as torch would, the weights of now."""

    @wraps(run_backward)
    def run_with_places(ctx: BackwardCFunction, *grads: Any) -> Any:
        attributes = vars(ctx)
        if not WATCHING or _NOTES not in attributes:
            return run_backward(ctx, *grads)
        units, places = attributes[_NOTES]
        if any(unit.phase is not Phase.IN_USE for unit in units):
            _note(attributes, anything=True)  # one deep in some object may show other weights now
        with _LookedUp(units, places):
            # A copy of what another node would read when the weights are not there any more.
            result, _ = copy_views(run_backward(ctx, *grads), lambda grad: unit_of(grad) is not None)
            if len(attributes) > 1:
                attributes[_NOTES] = units, list(dict.fromkeys(places + _note(attributes)))
        return result

    return run_with_places


def _with_frame(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def init_with_frame(self: _checkpoint_hook, frame: _CheckpointFrame) -> None:
        init(self, frame)
        self.frame = frame

    return init_with_frame


def _leave_checkpoint(self: _checkpoint_hook, *raised: Any) -> None:
    """The forward of a checkpoint is over. Views of weights in its function, and in its arguments, are noted."""
    super(_checkpoint_hook, self).__exit__(*raised)
    frame = self.__dict__.pop("frame")  # which holds no part of itself
    if WATCHING and raised[0] is None:
        # Before torch 2.13 a Function saves the arguments.
        places = _note([frame.recompute_fn, getattr(frame, "saved_args", ())])
        frame.recompute_fn = partial(_recompute, frame.recompute_fn, places)


def _recompute(recompute: Callable[..., Any], places: list[Place], *args: Any) -> Any:
    """A checkpoint runs its function again, which may leave other views than before."""
    with torch._C.DisableTorchFunctionSubclass():
        found = _views_in(args)
        units = [unit for _, place, unit in found if place is None]  # they have just been looked up
    with _LookedUp(units, places + [place for _, place, _ in found if place is not None]):
        try:
            return recompute(*args)
        finally:
            places[:] = dict.fromkeys(places + _note(recompute))


def _walk(root: Any, anything: bool) -> list[Tensor]:
    """Tensors in nested containers, dataclasses and closures; ``anything``: in objects of all kinds, but few."""
    found: list[Tensor] = []
    seen: set[int] = set()
    todo = [root]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        kind = type(each)
        if kind is FunctionType:
            inside = [each.__closure__, each.__defaults__, each.__kwdefaults__]  # not its module's globals
        elif issubclass(kind, Tensor):
            found.append(each)
            inside = []
        elif issubclass(kind, _CONTAINERS) or (hasattr(kind, "__dataclass_fields__") and not issubclass(kind, nn.Module)):
            inside = gc.get_referents(each)
        elif anything and len(seen) < _MOST and not (issubclass(kind, _NEVER) or str(kind.__module__).startswith(_PACKAGE)):
            inside = gc.get_referents(each)
        else:
            continue
        seen.add(id(each))
        if not _ATOMS.issuperset(map(type, inside)):  # else a long list of numbers would cost each call
            todo += [part for part in inside if type(part) not in _ATOMS]
    return found
