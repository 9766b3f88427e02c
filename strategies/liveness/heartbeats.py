"""Reports that ranks send each other through the store once a second.

A thread of their own sends them, because it may have to wait for the store.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from ..support import printable
from .diagnosis import Beat

BEAT_S = 1.0
# A rank that has looked at nothing for so long was stopped (Ctrl-Z), and perhaps all ranks were.
SUSPENDED_S = 5 * BEAT_S


class Report(NamedTuple):
    """The newest beat of a rank, and when this rank first read it, by its monotonic clock."""

    beat: Beat
    since: float


def first_line(error: BaseException) -> str:
    """Return the class of ``error`` and the first line of its message, at most 500 characters."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:500]


def print_error(text: str) -> None:
    """Print a line that may quote other processes."""
    # stderr may be on a full disk, or closed: the watch goes on.
    with suppress(OSError, ValueError):
        print(printable(text, kept="\n"), file=sys.stderr, flush=True)


class Verdict(NamedTuple):
    """Why the run ends.

    Attributes:
        rank: the rank that is the cause; -1 for no single one.
        text: the cause in words.
        stuck: no rank can raise by itself, as all wait for ever: processes end at once.
    """

    rank: int
    text: str
    stuck: bool = False


class Reports:
    """Sends this rank's beats, keeps those of others, and passes on the first verdict on the run.

    Args:
        store: keys and values of this run alone.
        rank: this rank.
        world_size: number of ranks.

    Attributes:
        newest: rank -> its report; only rank 0's, except on rank 0 or after :meth:`request_all`.
        verdict: why the run ends, as the first rank that knew it has sent it; else None.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.newest: dict[int, Report] = {}
        self.verdict: Verdict | None = None
        self._own = ""  # the newest beat of this rank
        self._own_verdict = ""  # a verdict that this rank sends
        self._needs_all = rank == 0
        self._wake_event, self._is_stopping = threading.Event(), False
        self._thread = threading.Thread(
            target=self._run, name="lightning_zero3.reports", daemon=True
        )
        self._thread.start()

    def send(self, beat: Beat) -> None:
        """Send ``beat`` to the other ranks."""
        self._own = beat.pack()
        self._wake_event.set()

    def send_verdict(self, verdict: Verdict) -> None:
        """Send ``verdict`` to the other ranks, unless one of them has sent another first."""
        self._own_verdict = json.dumps(verdict)
        self._wake_event.set()

    def request_all(self) -> None:
        """Read the reports of all ranks from now on, and at once."""
        self._needs_all = True
        self._wake_event.set()

    def stop(self) -> None:
        """Send what is not sent yet and end the thread."""
        self._is_stopping = True
        self._wake_event.set()
        self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        last = False
        while not last:
            self._wake_event.wait(BEAT_S)
            self._wake_event.clear()
            last = self._is_stopping
            try:
                self._exchange()
            except dist.DistNetworkError:
                # The store is gone for good. The silence of all says so, without torch's log of
                # each attempt to connect.
                return
            except RuntimeError:
                pass  # of the store

    def _exchange(self) -> None:
        store = self._store
        if self._own:
            store.set(str(self._rank), self._own)
        if self._own_verdict:
            store.compare_set("verdict", "", self._own_verdict)
        if self.verdict is None and store.check(["verdict"]):
            self.verdict = Verdict(*json.loads(store.get("verdict")))
        keys = [str(rank) for rank in range(self._world_size if self._needs_all else 1)]
        # hazard: `get` of a key that no rank has set yet waits.
        if not store.check(keys):
            return
        values = (
            store.multi_get(keys)
            if store.has_extended_api()  # type: ignore[attr-defined]  # the stub lacks it
            else map(store.get, keys)
        )
        for rank, value in enumerate(values):
            self._keep(rank, Beat.unpack(value.decode()))

    def _keep(self, rank: int, beat: Beat) -> None:
        known = self.newest.get(rank)
        if known is None or known.beat.number != beat.number:
            self.newest[rank] = Report(beat, time.monotonic())

    def forgive(self, now: float) -> None:
        """Count all silences from ``now`` on: this process was stopped, and others perhaps too."""
        for rank, report in list(self.newest.items()):
            self.newest[rank] = report._replace(since=now)
