"""Memory in which the ranks of one machine show each other how far they are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_RING = 512  # exchanges that can be told apart; far fewer are ever in flight
_POSTED, _LABELS, _DONE = 0, 1, 1 + _RING  # words of one rank
FLAGS_BYTES = 8 * (1 + 2 * _RING)
_SPINS = 100  # looks without sleeping
_LOOK_S = 0.1  # between two looks at whether the other process lives


class SharedFlags:
    """What each rank has posted and what it is done with; each writes its own, all read all.

    Args:
        words: [int64] the flags of each rank, in rank order.
        rank: of this process.
        processes: ids, in rank order.
        timeout_s: after which waiting is an error.

    Attributes:
        meanwhile: called again and again while this rank waits.
        require_same_label: given this rank's label of an exchange, another rank, and that one's
            label.
    """

    meanwhile: Callable[[], None]
    require_same_label: Callable[[int, int, int], None]

    def __init__(
        self, words: list[memoryview], rank: int, processes: list[int], timeout_s: float
    ) -> None:
        self._words, self._mine, self._rank, self._processes = words, words[rank], rank, processes
        self._timeout_s = timeout_s

    def post(self, label: int) -> int:
        """Say that this rank has come to an exchange; returns the exchange's number."""
        number = self._mine[_POSTED] + 1
        self._mine[_LABELS + number % _RING] = label
        self._mine[_POSTED] = number  # last: on x86 stores are seen in this order
        return number

    def is_posted(self, rank: int, number: int, label: int) -> bool:
        """Whether ``rank`` has come to exchange ``number``, and it has that ``label``."""
        words = self._words[rank]
        return words[_POSTED] >= number and words[_LABELS + number % _RING] == label

    def posted(self, rank: int, number: int) -> int:
        """Wait until ``rank`` has come to exchange ``number``; returns its label."""
        self._wait(rank, _POSTED, number)
        return self._words[rank][_LABELS + number % _RING]

    def finish(self, number: int) -> None:
        """Say that this rank has read all it needs of exchange ``number``."""
        self._mine[_DONE + number % _RING] = number

    def wait_until_read(self, number: int) -> None:
        """Until every rank has finished exchange ``number``."""
        for rank in range(len(self._words)):
            if rank != self._rank:
                self._wait(rank, _DONE + number % _RING, number)

    def _wait(self, rank: int, word: int, value: int) -> None:
        words = self._words[rank]
        if words[word] >= value:
            return
        for _ in range(_SPINS):
            os.sched_yield()
            if words[word] >= value:
                return
        began = looked = time.monotonic()
        pause = 2e-5
        while words[word] < value:
            self.meanwhile()
            time.sleep(pause)
            pause = min(1.5 * pause, 1e-3)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                self._require_alive(rank)
                self._require_same(rank)
            if now - began > self._timeout_s:
                raise RuntimeError(
                    f"Rank {self._rank} timed out: rank {rank} did not come in"
                    f" {self._timeout_s:.0f} s."
                )

    def _require_same(self, rank: int) -> None:
        """Both may have posted more than is waited for, and ``rank`` may have found a difference
        there and be gone.
        """
        words, last = self._words[rank], min(self._mine[_POSTED], self._words[rank][_POSTED])
        for number in range(max(1, last - _RING // 2), last + 1):
            place = _LABELS + number % _RING
            self.require_same_label(self._mine[place], rank, words[place])

    def _require_alive(self, rank: int) -> None:
        try:
            state = (
                Path(f"/proc/{self._processes[rank]}/stat")
                .read_text()
                .rpartition(")")[2]
                .split()[0]
            )
        except (FileNotFoundError, ProcessLookupError):
            state = "gone"
        if state in ("gone", "Z", "X"):
            raise RuntimeError(
                f"The connection to rank {rank} is lost: its process {self._processes[rank]} has"
                f" ended while rank {self._rank} waited for it. If it said why, that is in its"
                " output; it may have come to its end: forwards, saves and `gathered` are for all"
                " ranks, also after `fit`."
            )
