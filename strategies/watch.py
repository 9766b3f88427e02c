"""A thread beside training that knows where every rank is: nobody dies, raises, hangs or dawdles without a word.

Each rank reports once a second to the store that the processes met through. Nothing is exchanged on the training thread,
which only writes its position to memory. Processes of one machine see each other's end at once and read where it happened.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed import distributed_c10d

from .engine import collectives, shared
from .position import Activity, Neighbour, Place, Position, machine
from .symptoms import ELSEWHERE, ENGINE, Beat, Deadlock, Straggler

_BEAT_S = 1.0
_SAMPLES = 10  # of the training thread, for each beat
_NOT_USER_CODE = tuple(os.path.dirname(f) + os.sep for f in (torch.__file__, lightning.__file__, __file__, threading.__file__))
_DOORS = (collectives.__file__, shared.__file__)
_CONNECTION_WORDS = ("gloo", "connection", "nccl", "socket", "broken pipe", "timed out", "timeout")


@dataclass(frozen=True)
class WatchOptions:
    """When ranks are given up, and when they are slow; in seconds.

    Attributes:
        slow: over so long a time a rank must hold the others up to be named.
        lost: a rank that has not reported for so long is taken for dead. One whose process ended is found at once.
        grace: so long after another rank's end this one may take to raise; then its process is ended.
    """

    slow: float = 30.0
    lost: float = 60.0
    grace: float = 5.0

    def __post_init__(self) -> None:
        if not (self.slow > 0 and self.lost >= 5 * _BEAT_S and self.grace > 0):
            raise ValueError(f"WatchOptions need slow > 0, grace > 0 and lost >= {5 * _BEAT_S:.0f} seconds, not {self}.")


class Watch:
    """See the module.

    Args:
        options: time limits.
        store: keys and values for this run alone.
        rank: this rank.
        world_size: all ranks.
    """

    def __init__(self, options: WatchOptions, store: dist.Store, rank: int, world_size: int) -> None:
        self.position = Position()
        self.unit_name: Callable[[int], str] = str
        self._options, self._store, self._rank, self._world_size = options, store, rank, world_size
        self._machine, self._number, self._samples = machine(), 0, [ELSEWHERE]
        self._trained = threading.current_thread().ident
        self._beats: dict[int, tuple[Beat, float]] = {}  # rank -> its newest report, when it came
        self._neighbours: dict[int, Neighbour] = {}
        self._over: dict[int, Place] = {}  # ranks whose run has ended well
        self._deadlock, self._straggler = Deadlock(), Straggler(options.slow)
        self._verdict: dict[str, Any] | None = None
        self._deadline = float("inf")
        self._known = threading.Event()  # the verdict
        self._hurry = False
        self._wake_reader, self._wake_writer = os.pipe()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="lightning_zero3.watch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ training thread

    def doing(self, activity: Activity) -> _Doing:
        """Around ``activity``. Where that raises, the position stays."""
        return _Doing(self.position, activity)

    def ends_with(self, error: BaseException) -> None:
        """This rank's run ends with ``error``: tell the others; or, if one of them is behind it, say so in its message."""
        step = self.position.place().step
        if isinstance(error, collectives.DivergenceError):
            error.args = (f"In step {step}: {error}",)
        elif _is_about_a_connection(error) and (behind := self._who_broke_it()):
            error.args = (f"{behind} What this rank saw of it: {error}",)
            return
        words = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:500]
        words = f"Rank {self._rank} raised {words!r} in {self._describe(self.position.place())}."
        self._condemn(self._rank, words)
        self._deadline = time.monotonic() + self._options.lost  # its own clean-up may wait for the others

    def _who_broke_it(self) -> str:
        """Waits a few seconds for the news."""
        self._hurry = True
        self._wake()
        self._known.wait(min(self._options.lost, 6 * _BEAT_S))
        return self._message(self._verdict) if self._verdict is not None and self._verdict["rank"] != self._rank else ""

    def stop(self) -> None:
        """The run ends on this rank."""
        self.position.activity = Activity.ENDED
        if self._rank == 0 and self._verdict and any(b.machine != self._machine for b, _ in self._beats.values()):
            time.sleep(2 * _BEAT_S)  # the store may be this process's: leave other machines the time to read the verdict
        self._stopping = True
        self._wake()
        self._thread.join(2 * _BEAT_S)
        self.position.close()

    # ------------------------------------------------------------------------------------------------ the thread

    def _wake(self) -> None:
        os.write(self._wake_writer, b".")

    def _run(self) -> None:
        store_lost_at = float("inf")
        with suppress(RuntimeError):
            self._beat()
            self._store.wait([str(rank) for rank in range(self._world_size)], timedelta(seconds=_BEAT_S))
        while True:
            self._find_ended()
            try:
                self._beat()
                if self._stopping:
                    return
                self._look()
                store_lost_at = float("inf")
            except (RuntimeError, ValueError) as error:  # the store, or a value of it
                if self._stopping:
                    return
                store_lost_at = min(store_lost_at, time.monotonic())
                limit = 3 * _BEAT_S if self._hurry else self._options.lost
                if self._verdict is None and time.monotonic() > store_lost_at + limit:
                    self._conclude({"rank": 0, "text": f"The store of rank 0's machine does not answer ({error})."})
            self._end_if_late()
            self._sample()

    def _sample(self) -> None:
        """Look at the training thread for a second, or until a process of this machine ends."""
        poll = select.poll()
        for descriptor in (self._wake_reader, *(n.descriptor for n in self._neighbours.values())):
            poll.register(descriptor, select.POLLIN)
        self._samples = []
        for _ in range(_SAMPLES):
            self._samples.append(self._waits()[0])
            if events := poll.poll(1000 * _BEAT_S / _SAMPLES):
                if any(fd == self._wake_reader for fd, _ in events):
                    os.read(self._wake_reader, 100)
                return

    def _waits(self) -> tuple[str, str]:
        """Where the training thread waits for others, if it does, and the user's line it runs."""
        frame: FrameType | None = sys._current_frames().get(self._trained or 0)
        waits = code = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if not waits and file in (collectives.__file__, shared.__file__):
                waits = ENGINE
            elif not waits and file == distributed_c10d.__file__:
                waits = ELSEWHERE
            if not file.startswith(_NOT_USER_CODE) and not file.startswith("<"):
                code = f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
                break
            frame = frame.f_back
        return waits, code

    def _beat(self) -> None:
        self._number += 1
        waits, code = self._waits()
        busy = sum(not w for w in self._samples) / len(self._samples)
        beat = Beat(
            number=self._number,
            machine=self._machine,
            pid=os.getpid(),
            descriptor=self.position.descriptor,
            place=self.position.place(),
            busy=busy,
            waits=waits,
            code=code,
        )
        self._store.set(str(self._rank), beat.pack())

    def _look(self) -> None:
        if self._verdict is None and self._store.check(["verdict"]):
            self._conclude(json.loads(self._store.get("verdict")))
        if self._verdict is not None:
            return
        keys = [str(rank) for rank in range(self._world_size)]
        if len(self._beats) < self._world_size and not self._store.check(keys):
            return  # some have not begun
        everyone = self._rank == 0 or self._hurry or len(self._beats) < self._world_size
        ranks = [r for r in range(self._world_size) if everyone or r == 0]
        self._read(ranks)
        self._find_silent([r for r in ranks if r != self._rank])
        if self._rank == 0:
            self._diagnose([self._beats[r][0] for r in range(self._world_size)])

    def _read(self, ranks: list[int]) -> None:
        keys = [str(rank) for rank in ranks]
        values = self._store.multi_get(keys) if self._store.has_extended_api() else [self._store.get(k) for k in keys]
        now = time.monotonic()
        for rank, value in zip(ranks, values, strict=True):
            beat = Beat.unpack(value)
            known = self._beats.get(rank)
            if known is None or known[0].number != beat.number:
                self._beats[rank] = (beat, now)
            if known is None and rank != self._rank and beat.machine == self._machine:
                with suppress(OSError):
                    self._neighbours[rank] = Neighbour(beat.pid, beat.descriptor)

    def _find_ended(self) -> None:
        for rank, neighbour in list(self._neighbours.items()):
            if neighbour.ended:
                place, words = neighbour.place(), neighbour.words
                del self._neighbours[rank]
                neighbour.close()
                if words:
                    self._condemn(rank, words)
                elif place.activity == Activity.ENDED:
                    self._over[rank] = place
                else:
                    end = "died without a word (killed, out of memory, or os._exit)"
                    self._condemn(rank, f"Rank {rank} {end} in {self._describe(place)}.")
        for rank, place in self._over.items() if self._hurry else ():
            self._condemn(
                rank,
                f"Rank {rank} has ended its run before the others, its last step was {place.step}. All ranks must take the "
                "same number of steps; look for loaders of different length.",
            )

    def _find_silent(self, ranks: list[int]) -> None:
        now = time.monotonic()
        limit = 3 * _BEAT_S if self._hurry else self._options.lost
        for rank in ranks:
            beat, since = self._beats[rank]
            if beat.place.activity == Activity.ENDED:
                self._over[rank] = beat.place
            elif now - since > limit:
                place = self._neighbours[rank].place() if rank in self._neighbours else beat.place
                self._condemn(
                    rank,
                    f"Rank {rank} on {beat.machine.split()[0]} has not been heard of for {now - since:.0f} s (its process is "
                    f"stopped, or its machine or network is gone); it was in {self._describe(place)}.",
                )

    def _diagnose(self, beats: list[Beat]) -> None:
        if pair := self._deadlock.find(beats):
            inside, outside = (f"rank {r} is in {self._describe(beats[r].place)} ({beats[r].code})" for r in pair)
            self._condemn(
                pair[1],
                f"The ranks wait for each other for ever: {inside}, {outside}. All ranks must take the same number of "
                "steps and run the same modules in the same order; look for loaders of different length, and for a branch or "
                "a loop that depends on a rank's own data.",
                stuck=True,
            )
        elif warning := self._straggler.find(beats, self.unit_name):
            rank_zero_warn(warning)

    # ------------------------------------------------------------------------------------------------ verdicts

    def _condemn(self, rank: int, text: str, stuck: bool = False) -> None:
        verdict = json.dumps({"rank": rank, "text": text, "stuck": stuck})
        with suppress(RuntimeError):  # the store may be gone with the rank
            verdict = self._store.compare_set("verdict", "", verdict).decode()
        self._conclude(json.loads(verdict))

    def _conclude(self, verdict: dict[str, Any]) -> None:
        if self._verdict is not None:
            return
        self._verdict = verdict
        self.position.leave_words(verdict["text"])
        self._deadline = time.monotonic() + (0 if verdict.get("stuck") else self._options.grace)
        self._known.set()
        if verdict["rank"] != self._rank or verdict.get("stuck"):
            print(self._message(verdict), file=sys.stderr, flush=True)

    def _end_if_late(self) -> None:
        if time.monotonic() < self._deadline or self._stopping:
            return
        frame = sys._current_frames().get(self._trained or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        print(f"Rank {self._rank} did not end by itself; its process is ended here:\n{stack}", file=sys.stderr, flush=True)
        os._exit(1)

    def _message(self, verdict: dict[str, Any]) -> str:
        here = self._describe(self.position.place())
        return f"{verdict['text']} Rank {self._rank} ends too; it is in {here}. A new run goes on from the last checkpoint."

    def _describe(self, place: Place) -> str:
        return place.describe(self.unit_name)


class _Doing:
    """A context manager in two methods: it is entered several times per step."""

    def __init__(self, position: Position, activity: Activity) -> None:
        self._position, self._activity = position, activity

    def __enter__(self) -> None:
        self._before, self._position.activity = self._position.activity, self._activity

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._position.activity = self._before


def _is_about_a_connection(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _CONNECTION_WORDS)
