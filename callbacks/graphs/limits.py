"""Limits beyond which capturing does not pay."""

from __future__ import annotations

MOST_SIGNATURES = 200  # signatures of inputs for which records are kept
MOST_IN_VAIN = 5  # captures in a row that went out of date before they paid
_PAYING_REPLAYS = 5  # a capture has paid after so many replays per eager run before it

TOO_MANY = (
    f"{MOST_SIGNATURES} kinds of inputs came, and none of them often. Shapes, numbers and strings"
    " tell them apart: leave out ids and names, and pad to a few lengths."
)


class Recaptures:
    """Counts captures that went out of date.

    Args:
        warmup: eager runs before a capture.

    Attributes:
        count: number of captures that went out of date.
        in_vain: length of the latest series of these that were replayed too seldom to pay.
    """

    def __init__(self, warmup: int) -> None:
        self._paying_replays = _PAYING_REPLAYS * warmup
        self.count = self.in_vain = self._replays = 0

    def add(self, replays: int) -> bool:
        """Count one more; return whether another capture may pay.

        Args:
            replays: number of replays in the run so far.
        """
        has_paid = replays - self._replays >= self._paying_replays
        self.in_vain = 0 if has_paid else self.in_vain + 1
        self.count, self._replays = self.count + 1, replays
        return self.in_vain <= MOST_IN_VAIN
