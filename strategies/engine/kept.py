"""Views of weights that somebody holds when their unit's use ends, and the unit's memory is free for others.

Torch counts the tensors that share a storage, so whoever holds one is found, wherever it was made and whatever holds it: a list
of the user's, the ``ctx`` of a custom Function, a closure that a checkpoint runs again, a frame that a backward runs inside.
From then on a read of it gathers, and finds the weights of now, as in plain torch.
"""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..residency.functions import METADATA, RAW, instances, name_of, replaced, written
from ..residency.past_python import storage_of
from ..residency.resting import (
    NO_GRAPH_TASK,
    Absent,
    ResidencyError,
    graph_task,
    home_of,
    shield,
    told_of_value,
)
from .saved import SavedSlot, copy_of, kept_view, values_of
from .unit import Unit

_ABOUT = METADATA | {"dtype.__get__", "grad.__get__", "grad.__set__", "grad.__delete__"}
_places: WeakValueDictionary[int, Place] = WeakValueDictionary()  # by the ids of views; units hold them


class RestingView(Absent, Tensor):
    """A view of a unit that is not in use."""

    __repr__, __format__ = object.__repr__, object.__format__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Answer, gather or raise."""
        kwargs = kwargs or {}
        if name_of(func) not in _ABOUT:
            return _compute(func, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


@torch._disable_dynamo
def _compute(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func`` of the values of now, to which it does not write."""
    for view in instances(args[:1] if name_of(func) in RAW else written(func, args, kwargs), RestingView):
        raise kept_view(view, _place(view).unit)
    if func is torch.autograd.grad and len(args) > 1:
        args = args[0], replaced(args[1], RestingView, _edge_of), *args[2:]
    kwargs = {name: replaced(value, RestingView, _edge_of) if name == "inputs" else value for name, value in kwargs.items()}
    read: list[tuple[Tensor, str, tuple]] = []

    def value_of(view: RestingView) -> Tensor:
        read.append(_place(view).read(view))
        return read[-1][0]

    return shield(func(*replaced(args, RestingView, value_of), **replaced(kwargs, RestingView, value_of)), read)


def _edge_of(view: Tensor) -> GradientEdge:
    """What to differentiate by: it, and not a copy."""
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(view)


def _place(view: Tensor) -> Place:
    if id(view) not in _places:
        raise ResidencyError("A view of a weight was kept longer than its model.")
    return _places[id(view)]


class Place:
    """Where a view lies: others may read it while its unit is in use."""

    def __init__(self, view: Tensor, unit: Unit) -> None:
        self.unit = unit
        self._resting = RestingView if view.numel() else Tensor
        key, noted = id(view), unit.noted
        self._view = ref(view, lambda _: (_places.pop(key, None), noted.pop(key, None)))
        _places[key] = noted[key] = self

    def show(self, values: bool) -> None:
        """The use of its unit begins, or ends."""
        view = self._view()
        if type(view) in (Tensor, RestingView):
            view.__class__ = Tensor if values else self._resting

    def read(self, view: Tensor) -> tuple[Tensor, str, tuple]:
        """A copy of what ``view`` would show now, with its graph; collective. For the rest see :meth:`ShardedCopy.of`."""
        with torch._C.DisableTorchFunctionSubclass():
            parameter = next(self.unit.entries_at(view.data_ptr())).parameter
            home = home_of(parameter)
            if home is None or not (home.in_step or graph_task() != NO_GRAPH_TASK):
                raise kept_view(view, self.unit)
            value = copy_of(view, self.unit)
            if torch.is_grad_enabled() and view.requires_grad:
                linked = view.clone()  # of whatever is there
                linked.data.copy_(value)
                value = linked
        return value, told_of_value(parameter), (parameter, home.age(parameter))


def note(views: list[Tensor], unit: Unit) -> None:
    """Those among ``views`` that lie in the slot of ``unit``, which is in use, are held by somebody."""
    for view in views:
        if storage_of(view) == unit.storage and id(view) not in _places:
            Place(view, unit)


def note_kept(unit: Unit, failed: bool) -> None:
    """A use of ``unit`` is over, and there are more tensors in its slot than the engine, graphs and places have.

    Only then does anybody look for them, the youngest first.

    Args:
        failed: an exception ends the use, and what its traceback holds is no error.

    Raises:
        ResidencyError: somebody holds the memory who cannot be kept from reading it.
    """
    wrong = [kept_view(now, unit, " as an array (`.numpy()`)") for now, _, array in unit.in_arrays if array() is not None]
    unit.in_arrays.clear()
    with torch._C.DisableTorchFunctionSubclass():
        known = {id(view) for own in unit.own_views() for view in (own, own._base)}
        for generation in range(3):
            if unit.viewers() <= unit.usual:
                break
            young = [each for each in gc.get_objects(generation) if issubclass(type(each), Tensor | SavedSlot)]
            known.update(id(each[0]) for each in young if type(each) is SavedSlot)  # made after it: not older
            for view in (each for each in young if isinstance(each, Tensor) and id(each) not in known):
                if type(view) is Tensor and id(view) not in unit.noted and storage_of(view) == unit.storage:
                    Place(view, unit).show(False)
                elif (values := values_of(view)) is not None and storage_of(values) == unit.storage:
                    wrong.append(kept_view(values, unit, " in a sparse tensor"))
            young = view = values = None
        else:
            gc.collect()  # the rest may be in a cycle that nobody holds
    if not wrong and unit.viewers() > unit.usual:
        wrong.append(_unseen(unit))
    if wrong and not failed:
        raise wrong[0]


def _unseen(unit: Unit) -> ResidencyError:
    names = ", ".join([repr(entry.name) for entry in unit.entries[:4]] + ["..."] * (len(unit.entries) > 4))
    return ResidencyError(
        f"Memory of unit {unit.name} (parameters {names}) was kept after the forward or backward that used it, when it belongs "
        "to other units, by what is no ordinary tensor: an `nn.Parameter` made of a view, a storage, memory given to another "
        "library (DLPack). Keep that of a copy of the parameter (`.clone()`)."
    )
