"""A single rank: its shard is the whole. Parameters view the flat tensors directly, and nothing ever moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..collectives import LocalCollectives
from ..residency.resting import ResidencyError, keep_engine_last
from .chunk import Entry
from .reduce import Reducer
from .shards import FlatGroup
from .streams import Lane
from .unit import Arena, Unit


class WholeUnit(Unit):
    """A unit on a single rank: the shard is the whole, and the parameters view it directly. Nothing ever moves."""

    whole = True

    def connect(self, collectives: LocalCollectives, lane: Lane, arena: Arena, region: range) -> None:
        """See :meth:`Unit.connect`."""
        arena.holders.append(self)
        self._collectives, self._lane = collectives, lane
        views = [(entry, _view(entry, entry.group.data)) for entry in self.entries]
        self._views = [(entry, view, view.data_ptr()) for entry, view in views]
        for entry, view in views:
            entry.parameter.data = view
        for chunk in self.chunks:
            chunk.slot = torch.empty(0, dtype=chunk.dtype, device=arena.memory.device)

    def gather(self, ahead: bool = False) -> bool:
        """Always there."""
        return True

    def use(self, filled: bool = True) -> None:
        """Always usable, whatever a captured graph has ``filled``."""

    unuse = rest = release = arrive = replayed = use

    def refresh(self, changed: Sequence[Entry]) -> None:
        """Tell autograd that saved weights are not what they were; it cannot see that the flat tensor changed."""
        increment_version([entry.parameter for entry in changed])

    def adopt(self) -> None:
        """Take over what the user put in the place of ``parameter.data``, and hooks that came after the engine's."""
        for entry, view, address in self._views:
            if entry.parameter.data_ptr() != address:
                if entry.parameter.dtype != view.dtype:
                    raise ResidencyError(
                        f"Parameter {entry.name!r} was made {entry.parameter.dtype} after it was sharded as {view.dtype}. "
                        "Change dtypes before the model is sharded, in `__init__` or `configure_model`."
                    )
                view.copy_(entry.parameter.data)
                entry.parameter.data = view
            if entry.trained:
                keep_engine_last(entry.parameter)

    def full(self, flat: Callable[[FlatGroup], Tensor | None], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """See :meth:`Unit.full`."""
        self.adopt()
        return super().full(flat, dtype)


class WholeReducer(Reducer):
    """One rank: gradients go straight into the flat gradients."""

    lasting = True

    def __init__(self, units: list[Unit]) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self._ranges, self._open, self._flying = {}, [], None  # nothing waits, and nothing is on its way
        trained = [(entry, _view(entry, entry.group.grad)) for unit in units for entry in unit.trained]
        self._views = sorted(trained, key=lambda pair: pair[0].number)
        self._addresses = [view.data_ptr() for _, view in self._views]
        self.written = bytearray(b"\1" * len(trained))  # until gradients are cleared the next one is added
        self.claimed = bytearray(b"\1" * len(units))  # there is no range to claim
        self._shown: list[tuple[Entry, Tensor]] = []
        for chunk in (c for u in units for c in u.chunks if c.trained):
            for low, high in chunk.layout.gaps():
                group, start = chunk.place_of(low)
                group.idle.append((start, start + high - low))

    def view(self, unit: Unit, index: int) -> Tensor:
        """See :meth:`Reducer.view`."""
        return self._views[unit.trained[index].number][1]

    def show(self, shown: bytes) -> None:
        """Parameters are ordinary here, and so is their ``grad``: a view of the flat gradient."""
        self._shown = [(entry, view) for entry, view in self._views if shown[entry.number]]
        for entry, view in self._shown:
            entry.parameter.grad = view

    def hide(self) -> None:
        """Autograd would add to what it finds."""
        for entry, _ in self._shown:
            entry.parameter.grad = None
        self._shown = []

    def changed(self) -> list[tuple[Entry, Tensor | None]]:
        """See :meth:`Reducer.changed`. Once: what is left on a parameter would look like another one, after `zero_grad()`."""
        found = []
        for entry, view in self._shown:
            if (grad := entry.parameter.grad) is not view:
                found.append((entry, view, grad))
            elif view.data_ptr() != self._addresses[entry.number]:  # `parameter.grad.data = ...`
                found.append((entry, view, view.detach()))
                view.data = _view(entry, entry.group.grad)
        for entry, view, grad in found:
            entry.parameter.grad = None if grad is None else view
        return [(entry, grad) for entry, _, grad in found]

    def zero_untouched(self) -> None:
        """See :meth:`Reducer.zero_untouched`."""
        for entry, view in self._views:
            if not self.written[entry.number]:
                view.zero_()
                self.written[entry.number] = 1


def _view(entry: Entry, flat: Tensor) -> Tensor:
    """The parameter in a flat tensor of its group. One without elements lies nowhere."""
    return entry.view(flat, 0 if entry.part is None else entry.part.start)
