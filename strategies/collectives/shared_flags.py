"""Shared memory in which the ranks of one machine post which exchange each has reached."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_RING = 512  # exchanges whose flags are kept; far fewer are ever in flight
# Words of one rank: the number of its last exchange; by exchange modulo _RING the label; by the
# same the number of the exchange that it has finished.
_POSTED, _LABELS, _FINISHED = 0, 1, 1 + _RING
FLAGS_BYTES = 8 * (1 + 2 * _RING)
_SPINS = 100  # reads of a word before the first sleep
_LIVENESS_CHECK_S = 0.1  # between two checks that the other process lives


class SharedFlags:
    """Which exchanges each rank has posted and finished; a rank writes its own flags, reads all.

    Args:
        words: the flags of each rank [1 + 2 * 512, int64], in rank order.
        rank: the rank of this process.
        processes: process ids, in rank order.
        timeout_s: seconds after which a wait raises.

    Attributes:
        on_wait: called again and again while this rank waits.
        require_same_label: called with this rank's label of an exchange, another rank, and the
            label of that rank; raises if the labels differ.
    """

    on_wait: Callable[[], None]
    describe: Callable[[int], str]  # an exchange, by its label
    require_same_label: Callable[[int, int, int], None]

    def __init__(
        self, words: list[memoryview], rank: int, processes: list[int], timeout_s: float
    ) -> None:
        self._words, self._mine, self._rank, self._processes = words, words[rank], rank, processes
        self._timeout_s = timeout_s

    def post(self, label: int) -> int:
        """Post that this rank has reached its next exchange; return the exchange's number."""
        number = self._mine[_POSTED] + 1
        self._mine[_LABELS + number % _RING] = label
        # hazard: a rank that reads the number reads the label next. On x86 other processors see
        # stores in the order of the program, so the number is written last.
        self._mine[_POSTED] = number
        return number

    def is_posted(self, rank: int, number: int, label: int) -> bool:
        """Return whether ``rank`` has posted exchange ``number``, and with this ``label``."""
        words = self._words[rank]
        return words[_POSTED] >= number and words[_LABELS + number % _RING] == label

    def wait_for_post(self, rank: int, number: int) -> int:
        """Wait until ``rank`` has posted exchange ``number``; return its label."""
        self._wait(rank, _POSTED, number)
        return self._words[rank][_LABELS + number % _RING]

    def finish(self, number: int) -> None:
        """Post that this rank has read all it needs of exchange ``number``."""
        self._mine[_FINISHED + number % _RING] = number

    def wait_until_read(self, number: int) -> None:
        """Wait until every other rank has finished exchange ``number``."""
        for rank in range(len(self._words)):
            if rank != self._rank:
                self._wait(rank, _FINISHED + number % _RING, number)

    def _wait(self, rank: int, word: int, value: int) -> None:
        """Wait until ``word`` of ``rank`` is at least ``value``.

        Raises:
            RuntimeError: the process of ``rank`` has ended, or the wait timed out.
            DivergenceError: from ``require_same_label``.
        """
        words = self._words[rank]
        if words[word] >= value:
            return
        for _ in range(_SPINS):
            os.sched_yield()
            if words[word] >= value:
                return
        begin = last_check = time.monotonic()
        pause = 2e-5
        while words[word] < value:
            # hazard: the other rank may itself wait until this one has read an earlier exchange
            self.on_wait()
            time.sleep(pause)
            pause = min(1.5 * pause, 1e-3)
            now = time.monotonic()
            if now - last_check > _LIVENESS_CHECK_S:
                last_check = now
                self._require_alive(rank)
                self._require_same_labels(rank)
            if now - begin > self._timeout_s:
                raise RuntimeError(
                    f"Rank {self._rank} timed out: rank {rank} did not come in"
                    f" {self._timeout_s:.0f} s."
                )

    def _require_same_labels(self, rank: int) -> None:
        """Compare labels of all recent exchanges that this rank and ``rank`` have both posted.

        A difference may lie in a later exchange than the one that this rank waits for; ``rank`` may
        have raised there, and does not come back.
        """
        words, last = self._words[rank], min(self._mine[_POSTED], self._words[rank][_POSTED])
        for number in range(max(1, last - _RING // 2), last + 1):
            word = _LABELS + number % _RING
            self.require_same_label(self._mine[word], rank, words[word])

    def _require_alive(self, rank: int) -> None:
        process = self._processes[rank]
        try:
            text = Path(f"/proc/{process}/stat").read_text()
            state = text.rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "gone"
        if state in ("gone", "Z", "X"):  # zombie, dead
            doing = self.describe(self._mine[_LABELS + self._mine[_POSTED] % _RING])
            raise RuntimeError(
                f"The connection to rank {rank} is lost: its process {process} has ended while rank"
                f" {self._rank} waited for it to {doing}.\nIts output may say why. If it came to"
                f" its end, rank {self._rank} did alone what all ranks do together: forwards, reads"
                " of weights, saves and `gathered`, also after `fit`."
            )
