"""Tensors in slots that autograd saves for backward.

In backward a slot may hold another unit than it held in forward. A saved view of a slot is therefore noted as a place, and
looked up when backward reads it: in the slot if its unit is there, else gathered into memory of its own. So backward is
right by whatever path it reaches a unit (a loss on an intermediate value, an output that no hook can be set on, a view that
was changed in place); the hooks on outputs only make it fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .resting import ResidencyError
from .unit import Phase, Unit


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """What to view when backward asks for a tensor that lay in a slot."""

    unit: Unit
    version: int  # of the weights when it was saved
    offset: int  # bytes from the start of the unit's slot
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def view(self, slot: Tensor) -> Tensor:
        """The saved tensor inside ``slot`` [bytes of the unit's slot]."""
        typed = slot[self.offset :]
        typed = typed[: typed.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return torch.as_strided(typed, self.size, self.stride, typed.storage_offset())


class SavedTensors:
    """Pack and unpack hooks for ``torch.autograd.graph.saved_tensors_hooks``."""

    def __init__(self, units: list[Unit], arena: Tensor, offsets: Sequence[int]) -> None:
        self._units, self._arena, self._offsets = units, arena, offsets
        self._start = arena.data_ptr()
        self._stop = self._start + arena.numel()
        self._version = 0  # of the weights
        self._spilled: tuple[Unit, Tensor] | None = None

    def weights_changed(self) -> None:
        """What was saved before is out of date."""
        self._version += 1
        self._spilled = None

    def forget(self) -> None:
        """Free the memory of what was gathered for a single read."""
        self._spilled = None

    def pack(self, tensor: Tensor) -> Tensor | SavedSlot:
        """Autograd saves ``tensor``."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # has no storage (sparse, functorch): not a slot's
            return tensor
        if not self._start <= address < self._stop:
            return tensor
        for unit in self._units:
            offset = address - self._start - self._offsets[unit.index]
            if unit.phase is Phase.IN_USE and 0 <= offset < unit.nbytes:
                return SavedSlot(unit, self._version, offset, tensor.dtype, tensor.size(), tensor.stride())
        return tensor

    def unpack(self, saved: Tensor | SavedSlot) -> Tensor:
        """Backward reads what :meth:`pack` returned."""
        if type(saved) is not SavedSlot:
            return saved
        unit = saved.unit
        if saved.version != self._version:
            raise ResidencyError(
                f"Backward needs the weights of unit {unit.name} as they were in forward, but an optimizer step or a load "
                "changed them in between. Run backward before the step."
            )
        if unit.phase is Phase.RESTING:
            # Not into the slot: another operand of the same operation may be a view of what is there.
            return saved.view(self._spill(unit))
        unit.arrive()
        start = self._offsets[unit.index]
        return saved.view(self._arena[start : start + unit.nbytes])

    def _spill(self, unit: Unit) -> Tensor:
        """The unit's slot contents in memory of its own [bytes]; collective."""
        if self._spilled is None or self._spilled[0] is not unit:
            self._spilled = (unit, unit.copy_of_slot())
        return self._spilled[1]
