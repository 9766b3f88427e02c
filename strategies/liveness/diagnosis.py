"""What the reports of all ranks, sent once a second, say about the run: who hangs, who is slow. No
clock, no threads.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field

from .position import Activity, Place

ENGINE, ELSEWHERE = "engine", "elsewhere"  # where a rank may wait for others
_STUCK_BEATS = 3  # so long must a deadlock last, in reports, to be one
_SLOW_SHARE = 0.25  # so much more of its time than the others a slow rank works
_RECOVERED_SHARE = 0.1


@dataclass(frozen=True)
class Beat:
    """What one rank says about itself.

    Attributes:
        number: of the report.
        machine: see :func:`~.position.machine`.
        pid: of its process.
        descriptor: of its :class:`~.position.Position` in that process.
        place: where it is.
        busy: share of the last second in which it did not wait for others, 0 to 1.
        waits: where it waited at the end of that second: ENGINE, ELSEWHERE or "".
        code: the user's line that ran then.
        device: share of a step, measured in the last second, in which its device did not wait for
            others', 0 to 1; None if none was.
        trace: of its exchanges, see :class:`~.collectives.exchange_log.ExchangeLog`; empty if it
            has moved since the last report.
    """

    number: int
    machine: str
    pid: int
    descriptor: int
    place: Place
    busy: float
    waits: str
    code: str
    device: float | None = None
    trace: list[int] = field(default_factory=list)

    def pack(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def unpack(text: str | bytes) -> Beat:
        """The reverse of :meth:`pack`."""
        fields = json.loads(text)
        place = fields.pop("place")
        return Beat(place=Place(**{**place, "activity": Activity(place["activity"])}), **fields)


def aligned(beats: Sequence[Beat]) -> list[list[int]]:
    """Labels of each rank's exchanges since the agreement that rank 0 has come to last; empty where
    that is not known.
    """
    window = beats[0].trace[:1]
    return [beat.trace[1:] if beat.trace[:1] == window != [-1] else [] for beat in beats]


class _Unmoved:
    """Counts for how many reports of every rank nothing has changed."""

    def __init__(self) -> None:
        self._last: Hashable = None
        self._numbers: list[int] = []
        self._same = 0

    def count(self, state: Hashable, beats: Sequence[Beat]) -> int:
        """How often all ranks have reported again since ``state`` was another; who has ended
        reports no more.
        """
        numbers = [b.number for b in beats]
        if state != self._last:
            self._same, self._last, self._numbers = 0, state, numbers
        elif all(
            n > m or b.place.activity == Activity.ENDED
            for n, m, b in zip(numbers, self._numbers, beats, strict=True)
        ):
            self._same, self._numbers = self._same + 1, numbers
        return self._same


class Deadlock:
    """Ranks that wait for each other for ever, though no process is gone: they run different
    things.
    """

    def __init__(self) -> None:
        self._unmoved = _Unmoved()

    def find(self, beats: Sequence[Beat]) -> tuple[int, int] | None:
        """A rank that waits in the engine, and one that waits elsewhere or has ended, if that can
        never end.
        """
        moving = any(b.busy > 0 and b.place.activity != Activity.ENDED for b in beats)
        state = (moving, *((b.place, b.waits) for b in beats))
        if self._unmoved.count(state, beats) < _STUCK_BEATS or moving:
            return None
        # Whoever is elsewhere begins no exchange before the others have come there too.
        inside = [(b.place.exchanges, r) for r, b in enumerate(beats) if b.waits == ENGINE]
        gone = [b.waits == ELSEWHERE or b.place.activity == Activity.ENDED for b in beats]
        outside = [(b.place.exchanges, r) for r, b in enumerate(beats) if gone[r]]
        if inside and outside and max(inside)[0] > min(outside)[0]:
            return max(inside)[1], min(outside)[1]
        return None


class Standstill:
    """Ranks that all wait outside of the engine, and not at one place: perhaps for ever, but they
    may be in one exchange.
    """

    def __init__(self, seconds: float) -> None:
        self._beats, self._unmoved = max(_STUCK_BEATS, round(seconds)), _Unmoved()
        self._warned: Hashable = None

    def find(self, beats: Sequence[Beat], unit_name: Callable[[int], str]) -> str | None:
        """A warning, once for each standstill."""
        waiting = all(b.waits == ELSEWHERE and b.busy == 0 for b in beats)
        state = (waiting, *((b.place, b.code) for b in beats))
        if self._unmoved.count(state, beats) < self._beats or not waiting or state == self._warned:
            return None
        self._warned = state
        ranks: dict[str, list[str]] = {}
        for rank, beat in enumerate(beats):
            ranks.setdefault(f"{beat.place.describe(unit_name)} ({beat.code})", []).append(
                str(rank)
            )
        if len(ranks) == 1:
            return None
        where = "; ".join(
            f"rank{'s' * (len(there) > 1)} {', '.join(there)} in {place}"
            for place, there in ranks.items()
        )
        return (
            f"Nobody has moved for {self._beats} s. All ranks wait for others, and at different"
            f" places: {where}. If these are not lines of one exchange, they wait for ever: all"
            " ranks must come to the same collectives in the same order."
        )


class Straggler:
    """A rank that works while the others wait for it, by their hosts or, where those wait alike, by
    their devices.
    """

    def __init__(self, seconds: float) -> None:
        self._beats = max(2, round(seconds))
        self._history: deque[Sequence[Beat]] = deque(maxlen=self._beats)
        self._warned: dict[str, int | None] = {}

    def find(self, beats: Sequence[Beat], unit_name: Callable[[int], str]) -> str | None:
        """A warning, once for each time that a rank becomes slow."""
        if any(beat.place.activity == Activity.SETUP for beat in beats):
            self._history.clear()  # processes come up one after another
            return None
        self._history.append(list(beats))
        if len(self._history) < self._beats or len(beats) < 2:
            return None
        ranks = [[history[rank] for history in self._history] for rank in range(len(beats))]
        found = self._slow_host(ranks, unit_name)
        # Devices wait for a rank whose host is late, too.
        return (
            found
            if found is not None or self._warned["it worked"] is not None
            else self._slow_device(ranks, unit_name)
        )

    def _slow_host(self, ranks: list[list[Beat]], unit_name: Callable[[int], str]) -> str | None:
        found = self._compare("it worked", _busy(ranks))
        if found is None:
            return None
        slowest, text = found
        each = [[beat.busy for beat in beats] for beats in self._history]
        where = _most_often(
            ranks[slowest], [max(0.0, _ahead(shares, slowest)) for shares in each], unit_name
        )
        return (
            f"{text} While they waited it was most often in {where}; it is at step"
            f" {ranks[slowest][-1].place.step} now."
        )

    def _slow_device(self, ranks: list[list[Beat]], unit_name: Callable[[int], str]) -> str | None:
        shares = [[b.device for b in beats if b.device is not None] for beats in ranks]
        if (
            not all(shares)
            or (found := self._compare("its GPU did not wait for theirs", list(map(_mean, shares))))
            is None
        ):
            return None
        slowest, text = found
        hosts, host = _busy(ranks), ranks[slowest][-1].machine.split()[0]
        others = hosts[slowest] - (ahead := _ahead(hosts, slowest))
        # A GPU that gets no work from its host does not wait for other GPUs, either.
        # a host may wait all the time, for its device
        busy = [b.busy + 0.01 for b in ranks[slowest]]
        late = (
            "its host hands it work too late (most often it was in"
            f" {_most_often(ranks[slowest], busy, unit_name)})"
        )
        if ahead >= _RECOVERED_SHARE:
            return (
                f"{text} Its host worked {hosts[slowest]:.0%} of the time, the others {others:.0%}:"
                f" perhaps {late}; or that GPU has more to do or is slower."
            )
        return (
            f"{text} That GPU is slower (`nvidia-smi -q -d PERFORMANCE` on {host} tells of heat and"
            f" power limits), something else runs on it, this rank's batches are larger, or {late}."
        )

    def _compare(self, did: str, shares: list[float]) -> tuple[int, str] | None:
        """The rank that has become slow, and how much more of the time than the others it
        ``did``.
        """
        slowest = max(range(len(shares)), key=shares.__getitem__)
        ahead = _ahead(shares, slowest)
        if ahead < _RECOVERED_SHARE or slowest != self._warned.get(did):
            self._warned[did] = None
        if ahead < _SLOW_SHARE or self._warned[did] is not None:
            return None
        self._warned[did] = slowest
        return (
            slowest,
            (
                f"Rank {slowest} holds the others up: in the last {self._beats} s {did}"
                f" {shares[slowest]:.0%} of the time, the others {shares[slowest] - ahead:.0%}."
            ),
        )


def _busy(ranks: list[list[Beat]]) -> list[float]:
    return [_mean([b.busy for b in beats]) for beats in ranks]


def _most_often(beats: list[Beat], weights: list[float], unit_name: Callable[[int], str]) -> str:
    where: dict[str, float] = {}
    for beat, weight in zip(beats, weights, strict=True):
        at = beat.place.where(unit_name) + (f" ({beat.code})" if beat.code else "")
        where[at] = where.get(at, 0.0) + weight
    return max(where, key=where.__getitem__)


def _ahead(shares: list[float], rank: int) -> float:
    """Of the others' median."""
    others = sorted(share for r, share in enumerate(shares) if r != rank)
    return shares[rank] - others[len(others) // 2]


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares)
