"""When capturing does not pay."""

from __future__ import annotations

MOST_SIGNATURES = 200  # of inputs that are told from others
MOST_IN_VAIN = 5  # captures in a row that went out of date before they paid
_PAYS = 5  # replays for each eager run that led to a capture

TOO_MANY = (
    f"{MOST_SIGNATURES} kinds of inputs came, and none of them often. Shapes, numbers and strings"
    " tell them apart: leave out ids and names, and pad to a few lengths."
)


class Recaptures:
    """Counts captures that went out of date.

    Args:
        warmup: eager runs before a capture.

    Attributes:
        count: of all of them.
        in_vain: of the last ones in a row that were replayed too seldom.
    """

    def __init__(self, warmup: int) -> None:
        self._least = _PAYS * warmup
        self.count = self.in_vain = self._replays = 0

    def add(self, replays: int) -> bool:
        """One more went out of date, after so many ``replays`` in the run; whether to go on with
        others.
        """
        self.in_vain = 0 if replays - self._replays >= self._least else self.in_vain + 1
        self.count, self._replays = self.count + 1, replays
        return self.in_vain <= MOST_IN_VAIN
