"""The debug mode: writes that torch does not count, and that would be lost, are errors."""

from __future__ import annotations

import torch

from .engine import Chunk, Entry, ResidencyError, Unit
from .engine.isolation import isolated


class CheckedUnit(Unit):
    """A unit that compares its buffer with the shards at the end of each use.

    It is not unsharded ahead of one, so that the error of ranks that part names the first unit in
    which they do.
    """

    def unshard(self, ahead: bool = False) -> None:
        """See :meth:`Unit.unshard`."""
        if not ahead:
            super().unshard()

    def unuse(self) -> None:
        """See :meth:`Unit.unuse`; what was written past torch (by a pointer) would not reach the
        shards.
        """
        super().unuse()
        if self.pins:
            return
        with isolated():
            lost = [
                entry.name
                for chunk, part in zip(self.chunks, self.buffer.parts, strict=True)
                for entry in chunk.entries
                if not self._holds(chunk, part, entry)
            ]
        if lost:
            self.reshard()
            raise ResidencyError(
                f"Parameters of unit {self.name} ({', '.join(lost)}) were changed through a raw"
                " alias of their memory while they were unsharded; the change would be lost. Change"
                " them under `torch.no_grad()`, or between steps in `with"
                " strategy.gathered(module, modify=True):`."
            )

    def _holds(self, chunk: Chunk, part: torch.Tensor, entry: Entry) -> bool:
        """Whether the buffer holds of a parameter what this rank's shard holds."""
        found = entry.part_of(chunk.shard_of(part, self._collectives.rank))
        held = entry.part_of(chunk.values).to(found.device, chunk.dtype)
        return torch.equal(found.view(torch.uint8), held.view(torch.uint8))
