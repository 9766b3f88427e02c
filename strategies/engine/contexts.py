"""Views of weights that custom autograd Functions leave on ``ctx``, which autograd does not see.

They are noted when forward is over, like tensors that autograd saves (saved.py), and looked up when backward begins. What makes
a context, in each call of a Function, and what runs its backward are wrapped once for a process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function, _SingleLevelFunction

from ..residency.resting import ResidencyError
from .hooks import exchange
from .saved import WATCHING, SavedTensors, owner_of
from .unit import Unit

_PLACES = "_zero3_places"  # on a ctx: the views in its attributes, by whom they are looked up, and their units
_thread = threading.local()  # its `contexts`: of Functions that run, the innermost last; None until torch has made it


@cache
def watch_contexts() -> None:
    """From now on, for the engines of this process."""
    BackwardCFunction.__init__ = _remember
    _SingleLevelFunction.apply = classmethod(_apply)
    for name in ("apply", "apply_boxed"):  # the second since torch 2.13
        if hasattr(BackwardCFunction, name):
            setattr(BackwardCFunction, name, _with_places(getattr(BackwardCFunction, name)))


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
    if ctx is not None and WATCHING:
        places = [place for view in _views_in(vars(ctx)) if (place := _place_of(view)) is not None]
        if places:
            vars(ctx)[_PLACES] = places
    return result


def _views_in(value: Any) -> list[Tensor]:
    """Views of gathered weights in nested containers, which may hold themselves."""
    found: list[Tensor] = []
    seen: set[int] = set()
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, Tensor):
            found += [each] if any(saved.in_slot(each) for saved in WATCHING) else []
        elif isinstance(each, dict | list | tuple) and id(each) not in seen:
            seen.add(id(each))
            todo += each.values() if isinstance(each, dict) else each
    return found


def _place_of(view: Tensor) -> tuple[Tensor, SavedTensors, Unit] | None:
    owner = owner_of(view)
    unit = owner.unit_of(view)
    return None if unit is None else (view, owner, unit)  # else one of before, which nobody may read; see kept.py


def _look_up(view: Tensor, owner: SavedTensors, unit: Unit) -> Tensor:
    now = owner.look_up(view, unit)
    if now is not view and view.requires_grad and torch.is_grad_enabled():
        raise ResidencyError(
            f"A custom Function of unit {unit.name} kept a view of a weight on `ctx`, and is differentiated twice while that "
            "unit is not in use: nothing leads from there to the weight. Keep it by `ctx.save_for_backward`."
        )
    return now


def _with_places(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """A Function's backward, which finds on ``ctx`` what its forward left there, as torch would: the weights of now."""

    @wraps(run_backward)
    def run_with_places(ctx: BackwardCFunction, *grads: Any) -> Any:
        attributes = vars(ctx)
        places = attributes.pop(_PLACES, ())
        moved = [(view, now) for view, *where in places if (now := _look_up(view, *where)) is not view]
        if moved:
            exchange(attributes, {id(view): now for view, now in moved})
        try:
            return run_backward(ctx, *grads)
        finally:
            if moved:
                exchange(attributes, {id(now): view for view, now in moved})
            if places:
                attributes[_PLACES] = places

    return run_with_places
