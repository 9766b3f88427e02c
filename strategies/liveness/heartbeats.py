"""Reports that ranks send each other through the store once a second.

A thread of their own sends them, because it may have to wait for the store.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from ..support import printable
from .diagnosis import Beat

T = TypeVar("T")
BEAT_S = 1.0
# A rank that has looked at nothing for so long was stopped (Ctrl-Z), and perhaps all ranks were.
SUSPENDED_S = 5 * BEAT_S


@dataclass(frozen=True)
class Report:
    """The newest beat of a rank, with times of this rank's monotonic clock in seconds.

    Attributes:
        beat: what the rank reported.
        since: when this rank first read that beat.
        read: when this rank last read the store.
    """

    beat: Beat
    since: float
    read: float


def first_line(error: BaseException) -> str:
    """Return the class of ``error`` and the first line of its message, at most 500 characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:500]


def print_error(text: str) -> None:
    """Print a line that may quote other processes."""
    # stderr may be on a full disk, or closed: the watch goes on.
    with suppress(OSError, ValueError):
        print(printable(text, kept="\n"), file=sys.stderr, flush=True)


def read_verdict(text: str | bytes, world_size: int) -> dict[str, Any]:
    """Return the verdict in ``text``, as :meth:`Reports.send_verdict` has sent it.

    Raises:
        ValueError: it is none.
    """
    try:
        verdict = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if (
        type(verdict) is not dict
        or not {"rank", "text"} <= verdict.keys() <= {"rank", "text", "stuck"}
        or type(verdict["rank"]) is not int
        or not -1 <= verdict["rank"] < world_size
        or type(verdict["text"]) is not str
        or type(verdict.get("stuck", False)) is not bool
    ):
        raise ValueError("it is no verdict")
    return verdict


class Reports:
    """Sends this rank's beats, keeps those of others, and passes on the first verdict on the run.

    Args:
        store: keys and values of this run alone.
        rank: this rank.
        world_size: number of ranks.
        make_beat: makes a beat of this rank; called on the thread that sends.

    Attributes:
        newest: rank -> its report; only rank 0's, except on rank 0 or after :meth:`request_all`.
        verdict: why the run ends, as the first rank that knew it has sent it; else None.
        answered: when the store answered last, in seconds of the monotonic clock.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, make_beat: Callable[[], Beat]
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._make_beat = make_beat
        self.newest: dict[int, Report] = {}
        self.verdict: dict[str, Any] | None = None
        self.answered = time.monotonic()
        self._own_verdict: str | None = None  # JSON of a verdict that this rank sends
        self._misfits: set[str] = set()  # keys under which something else stood
        self._needs_all = rank == 0
        self._wake_event, self._is_stopping = threading.Event(), False
        self._thread = threading.Thread(
            target=self._run, name="lightning_zero3.reports", daemon=True
        )
        self._thread.start()

    def send_verdict(self, verdict: dict[str, Any]) -> None:
        """Send ``verdict`` to the other ranks, unless one of them has sent another first."""
        self._own_verdict = json.dumps(verdict)
        self._wake_event.set()

    def request_all(self) -> None:
        """Read the reports of all ranks from now on, and at once."""
        self._needs_all = True
        self._wake_event.set()

    def stop(self) -> None:
        """Send a last beat and end the thread."""
        self._is_stopping = True
        self._wake_event.set()
        self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        try:
            self._report()
        except Exception as error:
            # The error is this thread's. The other ranks, which hear no more, would take the
            # process or the store for gone.
            if self.verdict is None and not self._is_stopping:
                reason = (
                    f"its watch (not its model) raised {first_line(error)!r}; its own output says"
                    " where"
                )
                self.verdict = {
                    "rank": self._rank,
                    "text": f"Rank {self._rank} has stopped reporting: {reason}.",
                }
                with suppress(RuntimeError):
                    verdict = self._own_verdict or json.dumps(self.verdict)
                    self._store.compare_set("verdict", "", verdict)
            raise

    def _report(self) -> None:
        beat = self._make_beat().pack()
        # Some ranks come later, or the store is gone: the loop below asks again.
        with suppress(RuntimeError):
            self._store.set(str(self._rank), beat)
            self._store.wait(
                [str(rank) for rank in range(self._world_size)], timedelta(seconds=BEAT_S)
            )
        last = False
        while not last:
            # Outside of the `try`: errors in making a beat are no errors of the store.
            last, beat = self._is_stopping, self._make_beat().pack()
            try:
                self._exchange_reports(beat)
                self.answered = time.monotonic()
            except dist.DistNetworkError:
                # The store is gone for good. `answered` says so without torch's log of each
                # attempt to connect.
                return
            except RuntimeError:
                pass  # of the store
            if not last:
                self._wake_event.wait(BEAT_S)
                self._wake_event.clear()

    def _exchange_reports(self, beat: str) -> None:
        self._store.set(str(self._rank), beat)
        if self._own_verdict is not None:
            self._store.compare_set("verdict", "", self._own_verdict)
        if self.verdict is None and self._store.check(["verdict"]):
            value = self._store.get("verdict")
            self.verdict = self._read(
                "verdict", value, partial(read_verdict, world_size=self._world_size)
            )
            if self.verdict is None and self._own_verdict is not None:
                self._store.set("verdict", self._own_verdict)
        keys = [str(rank) for rank in range(self._world_size)]
        has_all = len(self.newest) == self._world_size
        # hazard: `get` of a key that no rank has set yet waits.
        if not has_all and not self._store.check(keys):
            return
        wanted = keys if self._needs_all or not has_all else keys[:1]
        values = (
            self._store.multi_get(wanted)
            if self._store.has_extended_api()  # type: ignore[attr-defined]  # the stub lacks it
            else map(self._store.get, wanted)
        )
        for key, value in zip(wanted, values, strict=True):
            if (found := self._read(key, value, Beat.unpack)) is not None:
                self._keep(int(key), found)

    def _read(self, key: str, value: bytes, unpack: Callable[[bytes], T]) -> T | None:
        """Return what ``value`` says; None, told once, if it is no message of this package."""
        try:
            return unpack(value)
        except ValueError as error:
            if key not in self._misfits:
                self._misfits.add(key)
                print_error(
                    f"What stands under {key!r} in the store is no message of the watch, and is"
                    f" dropped ({error}): {value[:60]!r}"
                )
            return None

    def _keep(self, rank: int, beat: Beat) -> None:
        now, known = time.monotonic(), self.newest.get(rank)
        since = known.since if known is not None and known.beat.number == beat.number else now
        # This process was stopped, and the other perhaps too: its silence counts from now on.
        if known is not None and now - known.read > SUSPENDED_S:
            since = now
        self.newest[rank] = Report(beat, since, now)
