"""Finds in the reports of all ranks, one a second, which rank hangs and which is slow.

Nothing here reads a clock or starts a thread.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass, field

from .position import Activity, Place

ENGINE, ELSEWHERE = "engine", "elsewhere"  # where a rank may wait for others
_STUCK_BEATS = 3  # number of reports over which a deadlock must last to be one
_SLOW_SHARE = 0.25  # a slow rank works at least so much more of its time than the others
_RECOVERED_SHARE = 0.1  # a rank below this is slow no more


@dataclass(frozen=True)
class Beat:
    """One report of a rank about itself.

    Attributes:
        number: number of the report, from 1.
        place: where the rank is.
        busy: share of the last second in which it did not wait for other ranks, 0 to 1.
        waits: where it waited at the end of that second: ENGINE, ELSEWHERE or "".
        code: the user's line that ran at the end of that second.
        trace: trace of its exchanges, see :class:`~.collectives.exchange_log.ExchangeLog`; empty if
            the rank has moved since its last report.
    """

    number: int
    place: Place
    busy: float
    waits: str
    code: str
    trace: list[int] = field(default_factory=list)

    def pack(self) -> str:
        """Return this beat as JSON."""
        return json.dumps(astuple(self))

    @staticmethod
    def unpack(text: str) -> Beat:
        """Return the beat that :meth:`pack` made ``text`` of."""
        number, (activity, *place), *others = json.loads(text)
        return Beat(number, Place(Activity(activity), *place), *others)


def align_traces(beats: Sequence[Beat]) -> list[list[int]]:
    """Return the labels of each rank's exchanges since rank 0's last agreement.

    The list of a rank is empty where its trace begins elsewhere, or the begin is unknown (-1).
    """
    window = beats[0].trace[:1]
    return [beat.trace[1:] if beat.trace[:1] == window != [-1] else [] for beat in beats]


class Standstill:
    """Finds ranks that wait for each other, though no process is gone.

    Those that can never meet, because they run different things, are a deadlock. Those that all
    wait outside the engine, and not at one place, perhaps wait for ever, but different lines may
    belong to one exchange.
    """

    def __init__(self, seconds: float) -> None:
        self._beats = max(_STUCK_BEATS, round(seconds))
        self._state: list[Hashable] = []
        self._numbers: list[int] = []
        self._count = 0  # how often all ranks have reported again since one moved

    def find(
        self, beats: Sequence[Beat], unit_name: Callable[[int], str]
    ) -> tuple[int, int] | str | None:
        """Return what was found in the newest reports.

        Returns:
            of a deadlock a rank that waits in the engine and one that can never join it, which
            waits elsewhere or has ended; or a warning, once for each standstill; or None.
        """
        state: list[Hashable] = [(b.place, b.waits, b.code) for b in beats]
        numbers = [b.number for b in beats]
        has_ended = [b.place.activity == Activity.ENDED for b in beats]
        is_moving = any(b.busy > 0 and not e for b, e in zip(beats, has_ended, strict=True))
        if is_moving or state != self._state:
            self._count, self._state, self._numbers = 0, state, numbers
        # A rank that has ended sends no more reports and is not waited for.
        if not all(n > m or e for n, m, e in zip(numbers, self._numbers, has_ended, strict=True)):
            return None
        self._count, self._numbers = self._count + 1, numbers
        if self._count < _STUCK_BEATS:
            return None
        # A rank that waits outside the engine cannot start an exchange until the others get there.
        inside = [(b.place.exchanges, r) for r, b in enumerate(beats) if b.waits == ENGINE]
        outside = [
            (b.place.exchanges, r)
            for r, b in enumerate(beats)
            if b.waits == ELSEWHERE or has_ended[r]
        ]
        if inside and outside and max(inside)[0] > min(outside)[0]:
            return max(inside)[1], min(outside)[1]
        if self._count != self._beats or any(b.waits != ELSEWHERE for b in beats):
            return None
        ranks: dict[str, list[str]] = {}
        for rank, beat in enumerate(beats):
            place = f"{beat.place.describe(unit_name)} ({beat.code})"
            ranks.setdefault(place, []).append(str(rank))
        if len(ranks) == 1:
            return None
        where = "; ".join(
            f"rank{'s' * (len(members) > 1)} {', '.join(members)} in {place}"
            for place, members in ranks.items()
        )
        return (
            f"Nobody has moved for {self._beats} s. All ranks wait for others, and at different"
            f" places: {where}. If these are not lines of one exchange, they wait for ever: all"
            " ranks must come to the same collectives in the same order."
        )


class Straggler:
    """Finds a rank whose host works while the others wait for it."""

    def __init__(self, seconds: float) -> None:
        self._beats = max(2, round(seconds))
        self._history: deque[Sequence[Beat]] = deque(maxlen=self._beats)
        self._slow_rank: int | None = None

    def find(self, beats: Sequence[Beat], unit_name: Callable[[int], str]) -> str | None:
        """Return a warning, once for each time that a rank becomes slow, else None."""
        if any(beat.place.activity == Activity.SETUP for beat in beats):
            self._history.clear()  # processes come up one after another
            return None
        self._history.append(list(beats))
        if len(self._history) < self._beats or len(beats) < 2:
            return None
        history = [[beat.busy for beat in beats] for beats in self._history]
        shares = [sum(busy) / len(busy) for busy in zip(*history, strict=True)]
        slowest = max(range(len(shares)), key=shares.__getitem__)
        lead = _lead(shares, slowest)
        if lead < _RECOVERED_SHARE or slowest != self._slow_rank:
            self._slow_rank = None
        if lead < _SLOW_SHARE or self._slow_rank is not None:
            return None
        self._slow_rank = slowest
        # Only what it did while the others waited counts.
        places: defaultdict[str, float] = defaultdict(float)
        for moment, busy in zip(self._history, history, strict=True):
            beat = moment[slowest]
            code = f" ({beat.code})" if beat.code else ""
            where = beat.place.describe_activity(unit_name) + code
            places[where] += max(0.0, _lead(busy, slowest))
        where = max(places, key=places.__getitem__)
        step = beats[slowest].place.step
        now = f"; it is at step {step} now" if step >= 0 else ""
        return (
            f"Rank {slowest} holds the others up: in the last {self._beats} s it worked"
            f" {shares[slowest]:.0%} of the time, the others {shares[slowest] - lead:.0%}. While"
            f" they waited it was most often in {where}{now}."
        )


def _lead(shares: list[float], rank: int) -> float:
    """Return by how much the share of ``rank`` is above the median of the others."""
    others = sorted(share for r, share in enumerate(shares) if r != rank)
    return shares[rank] - others[len(others) // 2]
