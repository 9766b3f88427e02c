"""What the ranks tell each other on the host at the end of a backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

from ..collectives import DivergenceError, LocalCollectives, Meeting, first_difference
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

        Returns the same of all ranks together: which trained parameters any used, and these two.

        Raises:
            DivergenceError: the ranks did not exchange the same things in the same order since the last time.
        """
        if self._collectives.world_size == 1:
            return bytes(self._used), late, changed
        diary = self._collectives.diary
        names = sorted(diary.written)
        written = list(zip(names, torch.stack([diary.written[n] for n in names]).tolist() if names else [], strict=True))
        # Of integers: the same in every process.
        trace = hash((*diary.trace[1:], *(number for name, total in written for number in (crc32(name.encode()), total)))) >> 2
        message = self._message
        message[0], message[1] = trace, -trace
        units, modules = 2 + len(late), 2 + len(late) + len(changed)
        message[2:modules] = torch.tensor(list(late + changed), device="cpu")
        message[modules:].copy_(self._flags)
        agreed = self._collectives.agree(message).tolist()
        if agreed[0] != -agreed[1]:
            everyone = self._collectives.all_gather_object(([*diary.trace[1:], Meeting.AGREEMENT], written))
            traces, values = zip(*everyone, strict=True)
            raise DivergenceError(first_difference(traces, self.describe) or _other_values(values))
        diary.agreed()
        return bytes(agreed[modules:]), bytes(agreed[2:units]), bytes(agreed[units:modules])

    def describe(self, label: int) -> str:
        """What the label of an exchange stands for."""
        if label < 0:
            return Meeting(label).description
        index, exchange = divmod(label, len(Exchange))
        verb = "reduce the gradients of" if exchange == Exchange.REDUCE else "gather"
        return f"{verb} unit {self._units[index].name}"


def _other_values(everyone: Sequence[Sequence[tuple[str, int]]]) -> str:
    """Which parameter got other values on one rank than on another, in words."""
    everything = {item for written in everyone for item in written}
    name = min(name for name, total in everything if any((name, total) not in written for written in everyone))
    return (
        f"A forward changed parameter {name!r} in place, and not to the same values on all ranks (as an embedding with "
        "`max_norm` does, or an initialisation from a rank's own data): it has one value. Compute the change from what all "
        "ranks have (`torch.distributed.all_reduce`), or make it between steps, in `with strategy.gathered(module, "
        "modify=True):`, where rank 0's counts (leave `max_norm` out, and renormalise there)."
    )
