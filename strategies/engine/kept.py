"""Views of weights that somebody holds when their unit's use ends: nobody can read them until they show the weights again.

The unit's memory belongs to others then. Torch counts the tensors that share a storage, so whoever holds one is found, wherever
the view was made: in a forward, in a backward, or between them.
"""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor

from ..residency.functions import METADATA, instances, name_of
from ..residency.past_python import storage_of
from ..residency.resting import ResidencyError, set_data
from .saved import SavedSlot, alias, hold, kept_view, look_up, values_of
from .unit import Phase, Unit

_ABOUT = METADATA | {"dtype.__get__", "grad.__get__", "grad.__set__", "grad.__delete__", "grad", "backward"}
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
        self._address, self._key, self._any = view.data_ptr(), id(view), view.numel() > 0
        key, noted = self._key, unit.noted
        self._view = ref(view, lambda _: (_places.pop(key, None), noted.pop(key, None)))
        _places[key] = noted[key] = self

    def show(self, values: bool) -> None:
        """The use of its unit begins, or ends."""
        view = self._view()
        if type(view) is (RestingView if values else Tensor) and self._any:
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
            self.unit.noted.pop(self._key)
        return True

    def put_back(self) -> None:
        """The end of what :meth:`look_up` began."""
        self.moved = False
        if (view := self._view()) is not None:
            self.unit.noted[self._key] = self
            memory = self.unit.memory
            set_data(view, alias(view, memory, self._address - memory.data_ptr()))
            self.show(self.unit.phase is Phase.IN_USE)


def place_of(view: Tensor) -> Place | None:
    """Where ``view`` lies, if that is noted."""
    return _places.get(id(view))


def note(views: list[Tensor], unit: Unit) -> None:
    """Those among ``views`` that lie in the slot of ``unit``, which is in use, are held by somebody."""
    for view in views:
        if storage_of(view) == unit.storage and place_of(view) is None:
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
