"""The debug mode: memory that a unit has given up reads as NaN, and writes that would be lost are
errors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..collectives import LocalCollectives
from ..residency.apart import apart
from ..residency.home import ResidencyError
from .chunk import Chunk
from .shards import Entry
from .streams import Stream
from .unit import Arena, Phase, Unit


class CheckedUnit(Unit):
    """A unit that verifies what ordinary ones take for granted; costs a gather and passes over the
    slot for each use.

    Its slot is nobody else's, see engine.py: who reads by an address finds NaN there whoever runs,
    and a write is found.
    """

    def connect(
        self, collectives: LocalCollectives, stream: Stream, arena: Arena, region: range
    ) -> None:
        """See :meth:`Unit.connect`."""
        super().connect(collectives, stream, arena, region)
        for slot in self._poisonable():
            slot.fill_(float("nan"))

    def _start(self) -> None:
        with apart():
            clean = self.phase is Phase.IN_USE or all(
                bool(slot.isnan().all()) for slot in self._poisonable()
            )
        if not clean:
            raise ResidencyError(
                f"The memory of unit {self.name} was written while its parameters rested, by an"
                " address that was kept from an earlier forward; the change would be lost. Change"
                " the parameters themselves, between steps in `with strategy.gathered(module,"
                " modify=True):`."
            )
        super()._start()

    def _poisonable(self) -> list[Tensor]:
        return [
            chunk.slot
            for chunk in self.chunks
            if chunk.dtype.is_floating_point or chunk.dtype.is_complex
        ]

    def unuse(self, failed: bool = False) -> None:
        """See :meth:`Unit.unuse`; what was written past torch (by a pointer) would not reach the
        shards.
        """
        super().unuse(failed)
        if self.pins:
            return
        with apart():
            lost = [
                entry.name
                for chunk in self.chunks
                for entry in chunk.entries
                if not self._holds(chunk, entry)
            ]
        if lost:
            raise ResidencyError(
                f"Parameters of unit {self.name} ({', '.join(lost)}) were changed through a raw"
                " alias of their memory while they were gathered; the change would be lost. Change"
                " them under `torch.no_grad()`, or between steps in `with"
                " strategy.gathered(module, modify=True):`."
            )
        # at once, not when another unit wants the memory: an old address finds NaN, not old numbers
        self.release()

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
            with apart():
                for slot in self._poisonable():
                    slot.fill_(float("nan"))
