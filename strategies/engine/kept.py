"""Views of weights that somebody keeps after their unit's use, when their memory belongs to other units."""

from __future__ import annotations

import gc

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..residency.resting import ResidencyError, is_sharded
from .unit import Arena, Phase, Unit


class KeptViews:
    """Finds them between uses, before an optimizer sees what was computed with them.

    Torch counts the tensors that share a memory. Only when there are more than the engine's own does anybody look for them.
    """

    captured = False  # CUDA graphs hold views, too, and know what is there when they are replayed

    def __init__(self, units: list[Unit], arena: Arena) -> None:
        self._units, self._arena = units, arena
        self._storage = arena.memory.untyped_storage()
        self._start = arena.memory.data_ptr()
        self._usual = self._count()

    def _count(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)

    def check(self, graphs_over: bool) -> None:
        """Raise a ResidencyError if anybody keeps a view of a unit that is not in use.

        Args:
            graphs_over: no backward is to come that would find its unit where it was, so that not even a graph's custom
                functions may keep any.
        """
        error = self._look(graphs_over)
        for generation in (1, 2):
            if error is not None:
                gc.collect(generation)  # it may be in a cycle that nobody holds
                error = self._look(graphs_over)
        if error is not None:
            raise error

    def _look(self, graphs_over: bool) -> ResidencyError | None:
        if self.captured or not self._arena.memory.numel() or self._count() <= self._usual:
            return None
        own = [view for unit in self._units for view in unit.own_views()]
        passed = {id(self._arena.memory), *map(id, own), *(id(view._base) for view in own)}
        found: list[Tensor] = []
        with torch._C.DisableTorchFunctionSubclass():
            for each in gc.get_objects():
                kind = type(each)
                if kind is tuple and len(each) == 4 and issubclass(type(each[2]), Unit):
                    passed.add(id(each[0]))  # saved by a graph, which knows where it lies; see saved.py
                elif issubclass(kind, BackwardCFunction) and not graphs_over:
                    passed.update(map(id, vars(each).values()))
                elif issubclass(kind, Tensor) and not is_sharded(each) and self._lies_in_slot(each):
                    found.append(each)
            view = next((each for each in found if id(each) not in passed), None)
        return None if view is None else kept_view(view, self._start, self._units, _names(view))

    def _lies_in_slot(self, tensor: Tensor) -> bool:
        """Of a unit that nobody uses, and nothing arrives at."""
        try:
            offset = tensor.data_ptr() - self._start
        except RuntimeError:  # it has no storage, or more than one
            return False
        busy = (unit.region for unit in self._arena.holders if unit.phase in (Phase.GATHERING, Phase.IN_USE))
        return 0 <= offset < self._arena.memory.numel() and not any(offset in region for region in busy)


def _names(view: Tensor) -> str:
    """Those of attributes, among others, that hold it."""
    names = (key for holder in gc.get_referrers(view) if type(holder) is dict for key, value in holder.items() if value is view)
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names) if isinstance(name, str))


def kept_view(view: Tensor, start: int, units: list[Unit], names: str = "") -> ResidencyError:
    """What to raise for a ``view`` in the arena that begins at ``start``, whose unit nobody knows."""
    places = ", ".join(unit.name for unit in units if view.data_ptr() - start in unit.region)
    return ResidencyError(
        f"A view (shape {tuple(view.shape)}) of a sharded parameter was kept{names and f' ({names})'} after the forward "
        f"that made it: its memory belongs to other units then. It was made in one of the units {places}. Keep a copy "
        "(`.clone()`), or use the parameter itself."
    )
