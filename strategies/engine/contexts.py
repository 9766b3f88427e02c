"""Views of weights that a graph holds past autograd: on the ``ctx`` of custom Functions, in closures of checkpoints.

They are noted when forward is over, like tensors that autograd saves (saved.py), and so are those that it leaves to anybody
else. While their unit is not in use nobody can read them; the backward that may need them makes them show the weights of now,
whatever container they are in. What makes a context or a checkpoint, and what runs it in backward, is wrapped once for a
process.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from sys import getrefcount
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, Function, _SingleLevelFunction
from torch.utils.checkpoint import _checkpoint_hook, _CheckpointFrame

from ..residency.functions import METADATA, instances, name_of
from ..residency.past_python import storage_of
from ..residency.resting import ResidencyError, set_data
from .kept import walk
from .saved import WATCHING, Reading, SavedSlot, alias, hold, kept_view, look_up, unit_of
from .unit import Phase, Unit, count_viewers

_NOTES = "_zero3_notes"  # on a ctx: the units whose forward made it, and the places of views that it holds
_ABOUT = METADATA | {"dtype.__get__", "grad.__get__", "grad.__set__", "grad.__delete__", "grad", "backward"}
_thread = threading.local()  # its `contexts`: of Functions that run, the innermost last; None until torch has made it
_places: WeakValueDictionary[int, Place] = WeakValueDictionary()  # by the ids of views; units hold them


class RestingView(Tensor):
    """A view that a graph, or anybody else, holds of a unit that is not in use."""

    __repr__, __format__ = object.__repr__, object.__format__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Raise, unless it is no question about the values."""
        with torch._C.DisableTorchFunctionSubclass():
            for view in instances([*args, *(kwargs or {}).values()], RestingView) if name_of(func) not in _ABOUT else ():
                if (place := _places.get(id(view))) is None:
                    raise ResidencyError("A view of a weight was kept longer than its model.")
                raise kept_view(view, place.unit)
            return func(*args, **(kwargs or {}))


class Place:
    """Where a view lies: that graphs hold it is right, and others may read it while its unit is in use."""

    def __init__(self, view: Tensor, unit: Unit) -> None:
        self.unit = unit
        self.moved = False  # it shows a copy of its weight, for somebody's backward
        self._address, key, noted = view.data_ptr(), id(view), unit.noted
        self._view = ref(view, lambda _: (_places.pop(key, None), noted.pop(key, None)))
        _places[key] = noted[key] = self

    def show(self, values: bool) -> None:
        """The use of its unit begins, or ends."""
        view = self._view()
        if not self.moved and type(view) is (RestingView if values else Tensor):
            view.__class__ = Tensor if values else RestingView

    def look_up(self) -> bool:
        """The view is needed; whether it shows a copy from here on, until :meth:`put_back`."""
        view = self._view()
        if view is None or self.moved:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            if view.data_ptr() != self._address:
                return False  # the user has set its `.data`
            now = look_up(view, self.unit)
            if now is view and not self.unit.lent:
                hold(self.unit)
                return False
            now = now.detach().clone() if now is view else now
            set_data(view, now)
            self.show(True)
            self.moved = True
        return True

    def put_back(self) -> None:
        """The end of what :meth:`look_up` began."""
        self.moved = False
        if (view := self._view()) is not None:
            memory = self.unit.memory
            set_data(view, alias(view, memory, self._address - memory.data_ptr()))
            self.show(self.unit.phase is Phase.IN_USE)


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
    found = [(view, _places.get(id(view))) for view in walk(holder, anything) if not isinstance(view, nn.Parameter)]
    units = [unit_of(view) if place is None else place.unit for view, place in found]
    return [(*each, unit) for each, unit in zip(found, units, strict=True) if unit is not None]


def _new_place(view: Tensor, unit: Unit) -> Place:
    if not unit.pins:
        raise kept_view(view, unit)
    return Place(view, unit)


# ---- kept by anybody else ------------------------------------------------------------------------


def note_kept(unit: Unit, outputs: list[Tensor]) -> None:
    """A forward of ``unit`` is over: nobody can read the views of its weights that are left until they show them again.

    Torch counts the tensors that share the slot. Those that autograd saves and those in places are known; only when there are
    more does anybody look for them, the youngest first.

    Args:
        outputs: views among what the forward returned, in whose place the caller gets copies.
    """
    with torch._C.DisableTorchFunctionSubclass():
        known = {id(view) for own in unit.own_views() for view in (own, own._base)}
        found = [view for view in outputs if storage_of(view) == unit.storage]
        for generation in range(4):
            for view in found:
                if type(view) is Tensor and view.numel() and id(view) not in known and id(view) not in unit.noted:
                    Place(view, unit).show(False)
            if generation == 3 or count_viewers(unit.storage) - getrefcount(unit.mark) - len(unit.noted) <= unit.viewers:
                return
            young = gc.get_objects(generation)
            known.update(id(each[0]) for each in young if type(each) is SavedSlot)  # made after it: not older
            found = [each for each in young if issubclass(type(each), Tensor) and storage_of(each) == unit.storage]


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
            result = run_backward(ctx, *grads)
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
