"""What ranks tell each other through the store, once a second, on a thread that may have to wait
for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .diagnosis import Beat

BEAT_S = 1.0
# a rank that has looked at nothing for so long was stopped (Ctrl-Z), and perhaps all were
STOOD_STILL_S = 5 * BEAT_S


@dataclass(frozen=True)
class Report:
    """The newest beat of a rank.

    Attributes:
        beat: what it said.
        since: when this rank first read that.
        read: when it last looked.
    """

    beat: Beat
    since: float
    read: float


def first_line(error: BaseException) -> str:
    """Its kind and what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:500]


class Reports:
    """Sends this rank's beats, keeps those of others, and passes on the first verdict on the run.

    Args:
        store: for this run alone.
        rank: this rank.
        world_size: all ranks.
        beat: makes a beat of this rank.

    Attributes:
        newest: rank -> its report; of rank 0 alone except on rank 0, or after :meth:`hurry`.
        verdict: what ended the run, as any rank has told.
        answered: when the store did last.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, beat: Callable[[], Beat]
    ) -> None:
        self._store, self._rank, self._world_size, self._beat = store, rank, world_size, beat
        self.newest: dict[int, Report] = {}
        self.verdict: dict[str, Any] | None = None
        self.answered = time.monotonic()
        self._mine: str | None = None  # a verdict of this rank, to be sent
        self._everyone = rank == 0
        self._news, self._stopping = threading.Event(), False
        self._thread = threading.Thread(
            target=self._run, name="lightning_zero3.reports", daemon=True
        )
        self._thread.start()

    def send(self, verdict: dict[str, Any]) -> None:
        """Tell the others, unless one of them has told something first."""
        self._mine = json.dumps(verdict)
        self._news.set()

    def hurry(self) -> None:
        """Ask for everybody's reports, now."""
        self._everyone = True
        self._news.set()

    def stop(self) -> None:
        """After a last beat."""
        self._stopping = True
        self._news.set()
        self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        try:
            self._report()
        except Exception as error:
            # this thread's; the others, who hear no more, would take the process or the store for
            # gone
            if self.verdict is None and not self._stopping:
                what = (
                    f"its watch (not its model) raised {first_line(error)!r}; its own output says"
                    " where"
                )
                self.verdict = {
                    "rank": self._rank,
                    "text": f"Rank {self._rank} has stopped reporting: {what}.",
                }
                with suppress(RuntimeError):
                    self._store.compare_set("verdict", "", self._mine or json.dumps(self.verdict))
            raise

    def _report(self) -> None:
        beat = self._beat().pack()
        # some come later, or the store is gone: what follows asks again
        with suppress(RuntimeError):
            self._store.set(str(self._rank), beat)
            self._store.wait(
                [str(rank) for rank in range(self._world_size)], timedelta(seconds=BEAT_S)
            )
        last = False
        while not last:
            # made outside: its errors are none of the store's
            last, beat = (
                self._stopping,
                self._beat().pack(),
            )
            try:
                self._talk(beat)
                self.answered = time.monotonic()
            except dist.DistNetworkError:
                # the store is gone for good; that it does not answer tells, without torch's words
                # on each attempt
                return
            except (RuntimeError, ValueError):
                pass  # the store's errors, and of what is in it
            if not last:
                self._news.wait(BEAT_S)
                self._news.clear()

    def _talk(self, beat: str) -> None:
        self._store.set(str(self._rank), beat)
        if self._mine is not None:
            self._store.compare_set("verdict", "", self._mine)
        if self.verdict is None and self._store.check(["verdict"]):
            self.verdict = json.loads(self._store.get("verdict"))
        keys = [str(rank) for rank in range(self._world_size)]
        begun = len(self.newest) == self._world_size
        if not begun and not self._store.check(keys):
            return
        wanted = keys if self._everyone or not begun else keys[:1]
        values = (
            self._store.multi_get(wanted)
            if self._store.has_extended_api()
            else map(self._store.get, wanted)
        )
        for key, value in zip(wanted, values, strict=True):
            self._keep(int(key), Beat.unpack(value))

    def _keep(self, rank: int, beat: Beat) -> None:
        now, known = time.monotonic(), self.newest.get(rank)
        since = known.since if known is not None and known.beat.number == beat.number else now
        if known is not None and now - known.read > STOOD_STILL_S:
            since = now
        self.newest[rank] = Report(beat, since, now)
