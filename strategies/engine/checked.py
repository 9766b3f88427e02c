"""The debug mode: memory that a unit has given up reads as NaN, and writes that would be lost are errors."""

from __future__ import annotations

import torch

from ..residency import ResidencyError
from .chunk import Chunk, Entry
from .layout import overlap
from .unit import Phase, Unit


class CheckedUnit(Unit):
    """A unit that verifies what ordinary ones take for granted; costs a pass over the slot, and a gather, for each use."""

    def use(self) -> None:
        """See :meth:`Unit.use`; no other unit may hold a part of the slot."""
        super().use()
        for other in self._arena.holders:
            if other is not self and overlap(self.region, other.region):
                raise RuntimeError(
                    f"Unit {self.name} is in use while unit {other.name} ({other.phase.value}) holds a part of its memory; "
                    "this is a bug in lightning_zero3."
                )

    def unuse(self) -> None:
        """See :meth:`Unit.unuse`; what was written past torch (by a pointer, as a numpy array) would not reach the shards."""
        super().unuse()
        if self.pins:
            return
        lost = [entry.name for chunk in self.chunks for entry in chunk.entries if not self._holds(chunk, entry)]
        if lost:
            raise ResidencyError(
                f"Parameters of unit {self.name} ({', '.join(lost)}) were changed through a raw alias of their memory while "
                "they were gathered; the change would be lost. Change them under `torch.no_grad()`, or in "
                "`with strategy.gathered(module, modify=True):`."
            )
        self.release()  # at once, not when another unit wants the memory: a stale view finds NaN, not old numbers

    def _holds(self, chunk: Chunk, entry: Entry) -> bool:
        """Whether the slot holds of a parameter what this rank's shard holds."""
        if entry.part is None:
            return True
        found = chunk.in_slot(entry.part, self._collectives.rank)
        held = entry.part.of(entry.group.data).to(chunk.wire_dtype).to(chunk.dtype)
        return torch.equal(found.view(torch.uint8), held.view(torch.uint8))

    def release(self) -> None:
        """See :meth:`Unit.release`."""
        gone = self.phase is not Phase.RESTING
        super().release()
        if gone and self.phase is Phase.RESTING:
            for chunk in self.chunks:
                if chunk.dtype.is_floating_point or chunk.dtype.is_complex:
                    chunk.slot.fill_(float("nan"))
