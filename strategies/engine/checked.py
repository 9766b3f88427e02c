"""The debug mode: memory that a unit has given up reads as NaN, and writes that would be lost are errors."""

from __future__ import annotations

import torch

from .resting import ResidencyError
from .unit import Phase, Unit


class CheckedUnit(Unit):
    """A unit that verifies what ordinary ones cannot see; costs a pass over the slot, and a gather, for each use."""

    def unuse(self) -> None:
        """See :meth:`Unit.unuse`.

        Raises:
            ResidencyError: a parameter's values were changed behind autograd's back (``parameter.data.clamp_()``), which would
                not reach the shards.
        """
        super().unuse()
        if self.pins:
            return
        for target, source in self._fills:
            if not torch.equal(target.view(torch.uint8), source.to(target.dtype).view(torch.uint8)):
                raise ResidencyError(
                    f"A parameter of unit {self.name} ({self._changed()}) was changed through `.data` or another alias while "
                    "it was gathered; the change would be lost. Change it under `torch.no_grad()` without `.data`, or in "
                    "`with strategy.gathered(module, modify=True):`."
                )
        self.release()  # at once, not when another unit wants the memory: a stale view finds NaN, not old numbers

    def _changed(self) -> str:
        """Names of the parameters whose part of the slot on this rank is not what the shards hold."""
        names = []
        for chunk in self.chunks:
            shard = chunk.shard_of(chunk.slot, self._collectives.rank)
            for index, entry in enumerate(chunk.entries):
                span = chunk.layout.span(index, self._collectives.rank)
                if span is None:
                    continue
                start, numel = chunk.flat_start(span), span.stop - span.start
                held = chunk.group_of(span).data[start : start + numel].to(chunk.dtype)
                if not torch.equal(shard[span.shard_start : span.shard_start + numel], held):
                    names.append(entry.name)
        return ", ".join(names)

    def release(self) -> None:
        """See :meth:`Unit.release`."""
        gone = self.phase is not Phase.RESTING
        super().release()
        if gone and self.phase is Phase.RESTING:
            for chunk in self.chunks:
                if chunk.dtype.is_floating_point or chunk.dtype.is_complex:
                    chunk.slot.fill_(float("nan"))
