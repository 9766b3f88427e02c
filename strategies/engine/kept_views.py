"""Views of weights that somebody holds when their unit's use ends, and the unit's memory is free
for others.

Torch counts the tensors that share a storage, so whoever holds one is found, wherever it was made
and whatever holds it: a list of the user's, the ``ctx`` of a custom Function, a closure that a
checkpoint runs again, a frame that a backward runs inside. From then on a read of it gathers, and
finds the weights of now, as in plain torch.
"""

from __future__ import annotations

import gc
import warnings
from functools import partial
from time import monotonic, sleep
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..residency.apart import apart, connected
from ..residency.functions import METADATA, RAW, in_words, instances, name_of, replaced, written
from ..residency.given_out import storage_of
from ..residency.home import ResidencyError, home_of
from ..residency.numbers import class_at_rest, hide, show
from ..residency.resting import (
    NO_GRAPH_TASK,
    Absent,
    ShardedCopy,
    graph_task,
    shield,
    told_of_value,
    writes_to,
)
from .saved_tensors import SavedSlot, copy_of, kept_view, parts_of, unit_of
from .unit import Unit


class RestingView(Absent, Tensor):
    """A view of a unit that is not in use."""

    __repr__ = object.__repr__

    def __format__(self, spec: str) -> str:
        """A number is formatted, anything else told without a look at the values."""
        return (
            format(self.item(), spec) if spec and not self.dim() else object.__format__(self, spec)
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Answer, gather or raise."""
        kwargs = kwargs or {}
        if name_of(func) not in METADATA:
            return _compute(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def refusal(self, name: str) -> ResidencyError:
        """See :meth:`Absent.refusal`."""
        return kept_view(
            self, _unit_of(self), f"{in_words(name)} would change it, or take its memory"
        )


@torch._disable_dynamo
def _compute(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func`` of the values of now, to which it does not write."""
    # which looks at what surrounds the view
    raw = name_of(func) in RAW or name_of(func) == "as_strided"
    for view in instances(args[:1] if raw else written(func, args, kwargs), RestingView):
        raise view.refusal(name_of(func))
    if func is torch.autograd.grad and len(args) > 1:
        args = args[0], replaced(args[1], RestingView, _edge_of), *args[2:]
    kwargs = {
        name: replaced(value, RestingView, _edge_of) if name == "inputs" else value
        for name, value in kwargs.items()
    }
    read: list[tuple[Tensor, str, tuple]] = []

    def value_of(view: RestingView) -> Tensor:
        read.append(_read(view))
        return read[-1][0]

    args, kwargs = replaced(args, RestingView, value_of), replaced(kwargs, RestingView, value_of)
    counts = [writes_to(value) for value, *_ in read]
    result = func(*args, **kwargs)
    for (value, told, _), count in zip(read, counts, strict=True):
        if writes_to(value) != count:
            raise ResidencyError(f"{in_words(name_of(func))} has changed {told}")
    return shield(result, read)


def _edge_of(view: Tensor) -> GradientEdge:
    """What to differentiate by: it, and not a copy."""
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(view)


def _unit_of(view: Tensor) -> Unit:
    with torch._C.DisableTorchFunctionSubclass():
        unit = unit_of(view)
    if unit is None:
        raise ResidencyError(
            "A view of a weight was kept longer than its model, or than the run that it was"
            " made in."
        )
    return unit


def _read(view: RestingView) -> tuple[Tensor, str, tuple]:
    """A copy of what ``view`` would show now, connected with it, and what :meth:`ShardedCopy.of` is
    to tell; collective.
    """
    unit, differentiable = _unit_of(view), torch.is_grad_enabled() and view.requires_grad
    with torch._C.DisableTorchFunctionSubclass():
        parameter = next(unit.entries_at(view.data_ptr())).parameter
        home = home_of(parameter)
        if home is None or not (home.in_step or graph_task() != NO_GRAPH_TASK):
            raise kept_view(view, unit, "is read outside of a step")
        value = copy_of(view, unit)
        if differentiable:
            with apart():
                value = connected(value, view)
        told = told_of_value(parameter), (parameter, home.age(parameter))
        return value.as_subclass(unit.noted[id(view)].cls), *told


def copy_to_read(view: Tensor) -> Tensor:
    """A copy of ``view``, which a unit in use returns: writes to it, and reads when its weight has
    changed, are errors.
    """
    copy, unit = view.clone(), unit_of(view)
    entry = next(unit.entries_at(view.data_ptr()), None) if unit is not None else None
    home = home_of(entry.parameter) if entry is not None else None
    if home is None or type(copy) is not Tensor:  # of a class of the user's, which stays
        return copy
    return ShardedCopy.of(
        copy, told_of_value(entry.parameter), read=(entry.parameter, home.age(entry.parameter))
    )


class Place:
    """A view that somebody holds, and its unit; its class says whether the unit is in use."""

    def __init__(self, view: Tensor, unit: Unit) -> None:
        self.cls = type(view)  # the user's
        self._resting = RestingView if view.numel() else self.cls
        if view.numel() == 1:
            whose = [entry.name for entry in unit.entries_at(view.data_ptr())]
            self._resting = class_at_rest(
                RestingView, view, f"a view that was kept of parameter {whose[0]!r}"
            )
        self._storage, self._forget = unit.storage, partial(unit.noted.pop, id(view), None)
        self._view = ref(view, lambda _, forget=self._forget: forget())
        unit.noted[id(view)] = self

    def show(self, values: bool) -> None:
        """The use of its unit begins, or ends."""
        view = self._view()
        if view is None:
            return
        if storage_of(view) == self._storage:
            if values:
                show(view)
            view.__class__ = self.cls if values else self._resting
            hide(view)
        else:
            self._forget()  # the user has set its `.data`


def note(views: list[Tensor], unit: Unit) -> None:
    """Those among ``views``, and parts of them, that lie in the slot of ``unit``, which is in use,
    are held by somebody.
    """
    for each in [each for view in views for each in (view, *parts_of(view))]:
        if (
            storage_of(each) == unit.storage
            and id(each) not in unit.noted
            and not isinstance(each, nn.Parameter)
        ):
            Place(each, unit)


def note_kept(unit: Unit, failed: bool) -> None:
    """A use of ``unit`` is over, and more have the memory than the engine, autograd and those who
    are known to.

    Only then does anybody look for them, the youngest first.

    Args:
        failed: an exception ends the use, and what its traceback holds is no error, but a warning.

    Raises:
        ResidencyError: somebody holds the memory who cannot be kept from reading it.
    """
    arrays = [alias.now for alias in unit.in_arrays if alias.array() is not None]
    wrong = [
        kept_view(now, unit, "is an array (`.numpy()`), which nobody can keep from being read")
        for now in arrays
    ]
    unit.in_arrays.clear()
    del arrays
    with torch._C.DisableTorchFunctionSubclass():
        known = {id(view) for own in unit.own_views() for view in (own, own._base)}
        for generation in range(3):
            if unit.viewers() <= unit.usual:
                break
            young = gc.get_objects(generation)
            kinds = {kind for kind in set(map(type, young)) if issubclass(kind, Tensor | SavedSlot)}
            young = [each for each in young if type(each) in kinds]  # of perhaps a million
            # made after it: not older
            known.update(id(each[0]) for each in young if type(each) is SavedSlot)
            for view in (
                each for each in young if isinstance(each, Tensor) and id(each) not in known
            ):
                wrong += _note_found(view, unit)
            young = view = None
    if unit.viewers() > unit.usual and not (
        unit.memory.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        # the rest may be in a cycle that nobody holds; one with a CUDA graph would end the capture
        gc.collect()
    if not wrong and not _is_free_soon(unit):
        wrong.append(_unseen(unit))
    if wrong and not failed:
        raise wrong[0]
    if wrong:
        warnings.warn(str(wrong[0]), stacklevel=2)


def _note_found(view: Tensor, unit: Unit) -> list[ResidencyError]:
    """Keep ``view`` from being read if it lies in the slot of ``unit``; what to raise if it cannot
    be kept from it.
    """
    if storage_of(view) == unit.storage:
        if id(view) not in unit.noted and not isinstance(view, nn.Parameter):
            Place(view, unit).show(False)
        return []
    parts = [part for part in parts_of(view) if storage_of(part) == unit.storage]
    return [
        kept_view(part, unit, f"is a part of a {type(view).__name__}, which nobody asks")
        for part in parts
    ]


def _is_free_soon(unit: Unit) -> bool:
    """A thread of a process group lets go of what it has exchanged a moment after it has said that
    it is done.
    """
    end = monotonic() + 1.0
    while unit.viewers() > unit.usual:
        if monotonic() > end:
            return False
        sleep(0.001)
    return True


def _unseen(unit: Unit) -> ResidencyError:
    names = ", ".join(
        [repr(entry.name) for entry in unit.entries[:4]] + ["..."] * (len(unit.entries) > 4)
    )
    return ResidencyError(
        f"Memory of unit {unit.name} (parameters {names}) was kept after the forward or backward"
        " that used it, when it belongs to other units, by what is no ordinary tensor: an"
        " `nn.Parameter` made of a view, a storage, a gradient that is a view of a weight, memory"
        " given to another library (DLPack); or torch.func has saved a view that was taken before"
        " it began. Keep a copy (`.clone()`); take views inside of the function that torch.func"
        " transforms."
    )
