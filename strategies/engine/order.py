"""The order in which units run: what to gather next, and the agreed way through a backward pass. Integers only."""

from __future__ import annotations

from collections import defaultdict


class ForwardOrder:
    """Remembers which unit followed which, to gather the next one ahead.

    A changed order costs one useless gather on every rank alike, never a wrong number.

    Args:
        foresees: else nothing is gathered ahead, so that where ranks part is where one gathers another unit.
    """

    def __init__(self, foresees: bool) -> None:
        self._foresees, self._next = foresees, dict[int, int]()
        self._last: int | None = None

    def begin(self) -> None:
        """A new pass over the model starts: what ran last does not lead to what runs first."""
        self._last = None

    def enter(self, unit: int) -> int | None:
        """Unit ``unit`` runs now; return the unit that followed it last time."""
        if self._last is not None and self._last != unit:
            self._next[self._last] = unit
        self._last = unit
        return self._next.get(unit) if self._foresees else None


class BackwardSchedule:
    """Visits of a backward pass in the order that all ranks expect: the reverse of their forward.

    Collectives must be issued in the same order by every rank, but a rank may skip a unit that others visit (its loss
    does not depend on it there). Walking this list to its end, a rank takes part in the collectives of all visits, its own
    or not.

    Attributes:
        coming: units of the visits still to come, the next one last.
        left: unit -> how many of them are its.
    """

    def __init__(self) -> None:
        self.coming: list[int] = []
        self.left: dict[int, int] = defaultdict(int)

    def record(self, unit: int) -> None:
        """The forward of ``unit`` made outputs that need gradients; the newest is visited first."""
        self.coming.append(unit)
        self.left[unit] += 1

    def clear(self) -> None:
        """Forget the pass."""
        self.coming.clear()
        self.left.clear()

    def advance(self) -> int:
        """Take the next visit whatever it is; return its unit."""
        unit = self.coming.pop()
        self.left[unit] -= 1
        return unit
