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

from ..residency.resting import ResidencyError, is_sharded
from .unit import Arena, Phase, Unit

_IN_GRAPHS = (BackwardCFunction, _CheckpointFrame)  # what holds views of weights as a part of a graph; see contexts.py
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType, partial, MethodType, BuiltinMethodType, SimpleNamespace)
_ATOMS = frozenset({type, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})
_NEVER = (type, ModuleType, FrameType, nn.Module)  # too much hangs on them; what they keep is found later
_PACKAGE = __name__.partition(".")[0]
_MOST = 1_000  # objects that are gone through for a view in any of them


class KeptViews:
    """Finds them where no use of a unit goes on: at the end of a backward, and when a step begins.

    Torch counts the tensors that share a memory. Only when there are more than the engine's own does anybody look for them.
    What a graph alone holds, and finds again because it was noted, may stay; so may what only a traceback holds.
    """

    captured = False  # CUDA graphs hold views, too, and know what is there when they are replayed

    def __init__(self, units: list[Unit], arena: Arena) -> None:
        self._units, self._arena = units, arena
        self._storage = arena.memory.untyped_storage()
        self._start = arena.memory.data_ptr()
        self._usual = self._count()
        self._nth = 0  # backward of a step
        self._innocent: dict[int, int] = {}  # after the nth: how many there were when only graphs held them

    def _count(self) -> int:
        return torch._C._storage_Use_Count(self._storage._cdata)

    def check(self, between_steps: bool) -> None:
        """Raise a ResidencyError if anybody keeps a view of a unit that is not in use.

        Args:
            between_steps: few graphs are left. Else what others hold is looked through once, and when it is more.
        """
        self._nth = 0 if between_steps else self._nth + 1
        least = self._innocent.get(self._nth, self._usual)
        if self.captured or not self._arena.memory.numel() or self._count() <= least:
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
            others = numbers.difference(*(unit.noted for unit in self._units))
            for holder in gc.get_referrers(*found):
                running = isinstance(holder, FrameType) or (isinstance(holder, GeneratorType) and holder.gi_running)
                wrong = others if id(holder) in passed else numbers
                held = [part for part in gc.get_referents(holder) if id(part) in wrong]
                if held and holder is not found and not running and id(holder) not in saved:
                    view = held[0]
                    return kept_view(view, self._start, self._units, _names(holder, view))
        return None

    def _find(self) -> tuple[list[Tensor], set[int], set[int]]:
        """Tensors in slots, but for the engine's own; ids of what autograd saves, and of what may hold those that are noted."""
        own = [view for unit in self._units for view in unit.own_views()]
        known = {id(self._arena.memory), *map(id, own), *(id(view._base) for view in own)}
        found: list[Tensor] = []
        saved: set[int] = set()
        passed: set[int] = set()
        for each in gc.get_objects():
            kind = type(each)
            if kind is tuple and len(each) == 4:
                # Saved by a graph, which knows where it lies; see saved.py. C code may still be filling such a tuple.
                if any(issubclass(type(part), Unit) for part in gc.get_referents(each)):
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
        try:
            offset = tensor.data_ptr() - self._start
        except RuntimeError:  # it has no storage, or more than one
            return False
        busy = (unit.region for unit in self._units if unit.lent or unit.phase in (Phase.GATHERING, Phase.IN_USE))
        return 0 <= offset < self._arena.memory.numel() and not any(offset in region for region in busy)


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


def kept_view(view: Tensor, start: int, units: list[Unit], names: str = "") -> ResidencyError:
    """What to raise for a ``view`` in the arena that begins at ``start``, whose unit nobody knows."""
    places = ", ".join(unit.name for unit in units if view.data_ptr() - start in unit.region)
    return ResidencyError(
        f"A view (shape {tuple(view.shape)}) of a sharded parameter was kept{names and f' ({names})'} after the forward "
        f"that made it: its memory belongs to other units then. It was made in one of the units {places}. Keep a copy "
        "(`.clone()`), or use the parameter itself."
    )
