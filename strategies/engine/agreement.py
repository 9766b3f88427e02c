"""What the ranks tell each other on the host at the end of a backward pass."""

from __future__ import annotations

import torch

from ..collectives import (
    DivergenceError,
    LocalCollectives,
    Meeting,
    first_difference,
    require_same_settings,
    require_same_values,
)
from .unit import Exchange, Unit


class Agreement:
    """One small message of every rank: did all run the same, what has gradients, what is late, whose buffers changed."""

    def __init__(self, units: list[Unit], collectives: LocalCollectives, used: bytearray, modules: int) -> None:
        self._units, self._collectives, self._used = units, collectives, used
        self._flags = torch.frombuffer(used, dtype=torch.uint8) if used else torch.empty(0, dtype=torch.uint8)
        self._message = torch.empty(2 + len(units) + modules + len(used), dtype=torch.int64, device="cpu")
        collectives.diary.describe = self.describe

    def reach(self, late: bytes, changed: bytes) -> tuple[bytes, bytes, bytes]:
        """Tell which units are ``late`` (gradients came after their reduction), which modules' buffers ``changed``; collective.

        ``changed`` is what :meth:`.Buffers.changed` says. Returns the same of all ranks together: which trained parameters any
        used, and these two.

        Raises:
            DivergenceError: the ranks did not exchange the same things in the same order since the last time, wrote other
                values, or have other options in their optimizers.
        """
        if self._collectives.world_size == 1:
            return bytes(self._used), late, changed
        diary = self._collectives.diary
        written = diary.checksums()
        digest = diary.digest(written)
        message = self._message
        message[0], message[1] = digest, -digest
        units, modules = 2 + len(late), 2 + len(late) + len(changed)
        message[2:modules] = torch.tensor(list(late + changed), device="cpu")
        message[modules:].copy_(self._flags)
        agreed = self._collectives.agree(message).tolist()
        if agreed[0] != -agreed[1]:
            mine = [*diary.trace[1:], Meeting.AGREEMENT], written, diary.settings()
            traces, values, settings = zip(*self._collectives.all_gather_object(mine), strict=True)
            if not (difference := first_difference(traces, self.describe)):
                require_same_values(values)
                require_same_settings(settings)
            raise DivergenceError(difference)
        diary.agreed()
        return bytes(agreed[modules:]), bytes(agreed[2:units]), bytes(agreed[units:modules])

    def describe(self, label: int) -> str:
        """What the label of an exchange stands for."""
        if label < 0:
            return Meeting(label).description
        index, exchange = divmod(label, len(Exchange))
        verb = "reduce the gradients of" if exchange == Exchange.REDUCE else "gather"
        return f"{verb} unit {self._units[index].name}"
