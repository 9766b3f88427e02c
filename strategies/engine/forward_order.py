"""The order in which units run, to unshard the next one ahead. Integers only."""

from __future__ import annotations


class ForwardOrder:
    """Remembers which unit followed which, to unshard the next one ahead.

    A changed order costs one useless unshard on every rank alike, never a wrong number.
    """

    def __init__(self) -> None:
        self._next = dict[int, int]()
        self._last: int | None = None

    def begin(self) -> None:
        """A new pass over the model starts: what ran last does not lead to what runs first."""
        self._last = None

    def enter(self, unit: int) -> int | None:
        """Unit ``unit`` runs now; return the unit that followed it last time."""
        if self._last is not None and self._last != unit:
            self._next[self._last] = unit
        self._last = unit
        return self._next.get(unit)
