"""Views of weights that somebody keeps after their unit's use, when their memory belongs to other units."""

from __future__ import annotations

import gc
from collections import deque
from functools import partial
from types import BuiltinMethodType, CellType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import _CheckpointFrame

from ..residency.past_python import storage_of
from ..residency.resting import ResidencyError, is_sharded
from .saved import SavedSlot, kept_view
from .unit import Phase, Unit, count_viewers

_IN_GRAPHS = (BackwardCFunction, _CheckpointFrame)  # what holds views of weights as a part of a graph; see contexts.py
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType, partial, MethodType, BuiltinMethodType, SimpleNamespace)
_ATOMS = frozenset({type, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_NEVER = (type, ModuleType, FrameType, nn.Module)  # too much hangs on them; what they keep is found later
_PACKAGE = __name__.partition(".")[0]
_MOST = 1_000  # objects that are gone through for a view in any of them


class KeptViews:
    """Finds them where no use of a unit goes on: at the end of a backward, and when a step begins.

    Torch counts the tensors that share a storage. Only when there are more than the engine's own does anybody look for them.
    What a graph alone holds, and finds again because it was noted, may stay; so may what only a traceback holds.
    """

    captured = False  # CUDA graphs hold views, too, and know what is there when they are replayed

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._slots = {unit.storage: unit for unit in units if not unit.whole}
        self._usual = self._count()
        self._nth = 0  # backward of a step
        self._innocent: dict[int, int] = {}  # after the nth: how many there were when only graphs held them

    def _count(self) -> int:
        return sum(map(count_viewers, self._slots))

    def check(self, between_steps: bool) -> None:
        """Raise a ResidencyError if anybody keeps a view of a unit that is not in use.

        Args:
            between_steps: few graphs are left. Else what others hold is looked through once, and when it is more.
        """
        self._nth = 0 if between_steps else self._nth + 1
        least = self._innocent.get(self._nth, self._usual)
        if self.captured or self._count() <= least:
            return
        error = self._look()
        for generation in (1, 2):
            if error is not None:
                gc.collect(generation)  # it may be in a cycle that nobody holds
                error = self._look()
        if error is not None:
            raise error
        if self._nth:
            self._innocent[self._nth] = self._count()

    def _look(self) -> ResidencyError | None:
        with torch._C.DisableTorchFunctionSubclass():
            found, saved, passed = self._find()
            numbers = set(map(id, found))
            others = numbers.difference(*(each.noted for each in self._units))
            for holder in gc.get_referrers(*found):
                running = isinstance(holder, FrameType) or (isinstance(holder, GeneratorType) and holder.gi_running)
                wrong = others if id(holder) in passed else numbers
                held = [part for part in gc.get_referents(holder) if id(part) in wrong]
                if held and holder is not found and not running and id(holder) not in saved:
                    return kept_view(held[0], self._slots[storage_of(held[0])], _names(holder, held[0]))
        return None

    def _find(self) -> tuple[list[Tensor], set[int], set[int]]:
        """Tensors in slots, but for the engine's own; ids of what autograd saves, and of what may hold those that are noted."""
        own = [view for each in self._units for view in each.own_views()]
        known = {*map(id, own), *(id(view._base) for view in own)}
        found: list[Tensor] = []
        saved: set[int] = set()
        passed: set[int] = set()
        for each in gc.get_objects():
            kind = type(each)
            if kind is SavedSlot:
                saved.add(id(each))
            elif issubclass(kind, _IN_GRAPHS):
                passed.add(id(each))
                walk(vars(each), seen=passed)
                if issubclass(kind, _CheckpointFrame):  # what a backward recomputed, and no other one will read
                    saved |= {id(recomputed.data) for recomputed in each.recomputed.values()}
            elif issubclass(kind, Tensor) and id(each) not in known and not is_sharded(each) and self._lies_in_slot(each):
                found.append(each)
        return found, saved, passed

    def _lies_in_slot(self, tensor: Tensor) -> bool:
        """Of a unit that nobody uses, and nothing arrives at."""
        unit = self._slots.get(storage_of(tensor))
        busy = unit is None or unit.lent or unit.phase in (Phase.GATHERING, Phase.IN_USE)
        return not busy and tensor.numel() > 0


def walk(root: Any, anything: bool = False, seen: set[int] | None = None) -> list[Tensor]:
    """Tensors in nested containers, dataclasses and closures; ``anything``: in objects of all kinds, but few.

    ``seen`` has ids of what is not gone through again, and gets those of what was.
    """
    found: list[Tensor] = []
    seen = set() if seen is None else seen
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


def _names(holder: Any, view: Tensor) -> str:
    """That of an attribute, among others."""
    table = holder if type(holder) is dict else getattr(holder, "__dict__", {})
    return ", ".join(f"`{key}`" for key, value in table.items() if value is view and isinstance(key, str))
