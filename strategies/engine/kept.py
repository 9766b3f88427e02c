"""Views of weights that somebody keeps after their unit's use, when their memory belongs to other units."""

from __future__ import annotations

import gc
from functools import partial
from types import CellType, FrameType, FunctionType, GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import _CheckpointFrame

from ..residency.resting import ResidencyError, is_sharded
from .unit import Arena, Phase, Unit

_CONTAINERS = (dict, list, tuple, set, CellType, partial)


class KeptViews:
    """Finds them where no use of a unit goes on: at the end of a backward, and when a step begins.

    Torch counts the tensors that share a memory. Only when there are more than the engine's own does anybody look for them.
    What a graph holds, and finds again where it was, may stay; so may what only a traceback holds.
    """

    captured = False  # CUDA graphs hold views, too, and know what is there when they are replayed

    def __init__(self, units: list[Unit], arena: Arena) -> None:
        self._units, self._arena = units, arena
        self._storage = arena.memory.untyped_storage()
        self._start = arena.memory.data_ptr()
        self._usual = self._innocent = self._count()

    def _count(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)

    def check(self, between_steps: bool) -> None:
        """Raise a ResidencyError if anybody keeps a view of a unit that is not in use.

        Args:
            between_steps: few graphs are left. In a backward what others hold is looked through once, and when it is more.
        """
        least = self._usual if between_steps else self._innocent
        if self.captured or not self._arena.memory.numel() or self._count() <= least:
            return
        error = self._look()
        for generation in (1, 2):
            if error is not None:
                gc.collect(generation)  # it may be in a cycle that nobody holds
                error = self._look()
        if error is not None:
            raise error
        if not between_steps:
            self._innocent = self._count()

    def _look(self) -> ResidencyError | None:
        own = [view for unit in self._units for view in unit.own_views()]
        passed = {id(self._arena.memory), *map(id, own), *(id(view._base) for view in own)}
        found: list[Tensor] = []
        with torch._C.DisableTorchFunctionSubclass():
            for each in gc.get_objects():
                kind = type(each)
                if kind is tuple and len(each) == 4:
                    parts = gc.get_referents(each)  # C code may still be filling it
                    if any(issubclass(type(part), Unit) for part in parts):
                        passed.update(map(id, parts))  # saved by a graph, which knows where it lies; see saved.py
                elif issubclass(kind, BackwardCFunction | _CheckpointFrame):
                    _pass_what_is_in(vars(each), passed)
                elif issubclass(kind, Tensor) and not is_sharded(each) and self._lies_in_slot(each):
                    found.append(each)
            for view in found:
                holders = [h for h in gc.get_referrers(view) if h is not found and not isinstance(h, FrameType | GeneratorType)]
                if holders and id(view) not in passed:
                    return kept_view(view, self._start, self._units, _names(holders, view))
        return None

    def _lies_in_slot(self, tensor: Tensor) -> bool:
        """Of a unit that nobody uses, and nothing arrives at."""
        try:
            offset = tensor.data_ptr() - self._start
        except RuntimeError:  # it has no storage, or more than one
            return False
        busy = (unit.region for unit in self._units if unit.lent or unit.phase in (Phase.GATHERING, Phase.IN_USE))
        return 0 <= offset < self._arena.memory.numel() and not any(offset in region for region in busy)


def _pass_what_is_in(attributes: dict[str, Any], passed: set[int]) -> None:
    """Add the ids of what these hold, by containers and closures."""
    todo: list[Any] = [attributes]
    while todo:
        each = todo.pop()
        if id(each) in passed:
            continue
        passed.add(id(each))
        if isinstance(each, _CONTAINERS):
            todo += gc.get_referents(each)
        elif isinstance(each, FunctionType):
            todo += [each.__closure__, each.__defaults__, each.__kwdefaults__]  # not its module's globals


def _names(holders: list[Any], view: Tensor) -> str:
    """Those of attributes, among others, that it is held by."""
    tables = [holder if type(holder) is dict else getattr(holder, "__dict__", {}) for holder in holders]
    names = (key for table in tables for key, value in table.items() if value is view and isinstance(key, str))
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def kept_view(view: Tensor, start: int, units: list[Unit], names: str = "") -> ResidencyError:
    """What to raise for a ``view`` in the arena that begins at ``start``, whose unit nobody knows."""
    places = ", ".join(unit.name for unit in units if view.data_ptr() - start in unit.region)
    return ResidencyError(
        f"A view (shape {tuple(view.shape)}) of a sharded parameter was kept{names and f' ({names})'} after the forward "
        f"that made it: its memory belongs to other units then. It was made in one of the units {places}. Keep a copy "
        "(`.clone()`), or use the parameter itself."
    )
