"""A thread beside training that knows where every rank is: nobody dies, raises, hangs or dawdles
without a word.

Each rank reports once a second to the store that the processes met through. Nothing is exchanged on
the training thread, which only writes its position to memory. Processes of one machine see each
other's end at once and read where it happened.
"""

from __future__ import annotations

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

from ..collectives import (
    DivergenceError,
    LocalCollectives,
    first_difference,
    pairwise,
    process_group,
    shared_flags,
    shared_memory,
)
from ..collectives.exchange_log import LOOK_FOR
from ..support.thread_stacks import read_frames
from .device_idle import DeviceWaits
from .diagnosis import ELSEWHERE, ENGINE, Beat, Deadlock, Standstill, Straggler, aligned
from .heartbeats import BEAT_S, STOOD_STILL_S, Report, Reports, first_line
from .position import Activity, Neighbour, Place, Position, machine

_NOBODY = -1  # alone is behind it
_SAMPLES = 10  # of the training thread, for each beat
_INSTALLED = [os.path.dirname(os.path.dirname(package.__file__)) for package in (torch, lightning)]
_STRATEGIES = os.path.dirname(os.path.dirname(__file__))
_OURS = _STRATEGIES, os.path.join(os.path.dirname(_STRATEGIES), "callbacks")
_NOT_USER_CODE = tuple(
    os.path.join(folder, "")
    for folder in (*_INSTALLED, *_OURS, os.path.dirname(threading.__file__))
)
_COMMUNICATORS = tuple(
    module.__file__ for module in (shared_flags, process_group, pairwise, shared_memory)
)
_CONNECTION_WORDS = ("gloo", "connection", "nccl", "socket", "broken pipe", "timed out", "timeout")


@dataclass(frozen=True)
class WatchOptions:
    """When ranks are given up, and when they are slow; in seconds.

    Attributes:
        slow: over so long a time a rank must hold the others up, or all must wait at different
            places, to be named.
        lost: a rank that has not reported for so long is taken for dead. One whose process ended is
            found at once.
        grace: so long after another rank's end this one may take to raise; then its process is
            ended.
    """

    slow: float = 30.0
    lost: float = 60.0
    grace: float = 5.0

    def __post_init__(self) -> None:
        if not (self.slow > 0 and self.lost >= 5 * BEAT_S and self.grace > 0):
            raise ValueError(
                f"WatchOptions need slow > 0, grace > 0 and lost >= {5 * BEAT_S:.0f} seconds, not"
                f" {self}."
            )


class Watch:
    """See the module.

    Args:
        options: time limits.
        store: keys and values for this run alone.
        rank: this rank.
        world_size: all ranks.
    """

    def __init__(
        self, options: WatchOptions, store: dist.Store, rank: int, world_size: int
    ) -> None:
        self.position = Position()
        self.unit_name: Callable[[int], str] = str
        self.communicator = LocalCollectives()  # whose exchanges are told
        self.device_waits: DeviceWaits | None = None  # where hosts do not wait for exchanges
        self._options, self._rank, self._world_size = options, rank, world_size
        # no beat shall wait for the training thread's connection
        self._calls, self._call_store = (
            0,
            store.clone(),
        )
        self._machine, self._number, self._samples = machine(), 0, [ELSEWHERE]
        self._reported: Place | None = None
        self._trained = threading.current_thread().ident
        self._neighbours: dict[int, Neighbour | None] = {}  # None: on another machine, or ended
        self._over: dict[int, Place] = {}  # ranks whose run has ended well
        self._unread: dict[
            int, float
        ] = {}  # ranks that have ended, nobody here saw how -> when the store had time to tell
        self._deadlock, self._standstill, self._straggler = (
            Deadlock(),
            Standstill(options.slow),
            Straggler(options.slow),
        )
        self._verdict: dict[str, Any] | None = None
        self._deadline = float("inf")
        self._known = threading.Event()  # the verdict
        self._hurry = False
        self._wake_reader, self._wake_writer = os.pipe()
        self._stopping, self._looked = False, time.monotonic()
        self._reports = Reports(store, rank, world_size, self._beat)
        self._thread = threading.Thread(target=self._run, name="lightning_zero3.watch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------ training thread

    def doing(self, activity: Activity) -> _Doing:
        """Around ``activity``. Where that raises, the position stays."""
        return _Doing(self.position, activity)

    def ends_with(self, error: BaseException) -> None:
        """This rank's run ends with ``error``: tell the others; or, if one of them is behind it,
        say so in its message.
        """
        step = self.position.place().step
        if isinstance(error, DivergenceError):
            error.args = (f"In step {step}: {error}",)
        elif _is_about_a_connection(error) and (behind := self._who_broke_it()):
            error.args = (f"{behind} What this rank saw of it: {error}",)
            return
        self._condemn(
            self._rank,
            f"Rank {self._rank} raised {first_line(error)!r} in"
            f" {self._describe(self.position.place())}.",
        )
        # its own clean-up may wait for the others
        self._deadline = time.monotonic() + self._options.lost

    def all_end_with(self, error: BaseException) -> bool:
        """Whether all ranks come here with such an error, from the same place, within two seconds;
        the same on all ranks.
        """
        self._calls += 1
        place, store, call = self.position.place(), self._call_store, f"roll call {self._calls}"
        keys = [f"{call}, rank {rank}" for rank in range(self._world_size)]
        mine = f"{type(error).__name__} {place.step} {place.exchanges}"
        try:
            store.set(keys[self._rank], mine)
            with suppress(dist.DistStoreError):  # some did not come in time
                store.wait(keys, timedelta(seconds=2 * BEAT_S))
            alike = store.check(keys) and all(store.get(key).decode() == mine for key in keys)
            # the first answer is everybody's
            return store.compare_set(call, "", "alike" if alike else "apart") == b"alike"
        except RuntimeError:  # the store is gone with its rank
            return False

    def _who_broke_it(self) -> str:
        """Waits a few seconds for the news."""
        self._hurry = True
        self._reports.hurry()
        self._wake()
        self._known.wait(min(self._options.lost, 6 * BEAT_S))
        return (
            self._message(self._verdict)
            if self._verdict is not None and self._verdict["rank"] != self._rank
            else ""
        )

    def stop(self) -> None:
        """The run ends on this rank."""
        self.position.activity = Activity.ENDED
        if (
            self._rank == 0
            and self._verdict
            and any(r.beat.machine != self._machine for r in self._reports.newest.values())
        ):
            # the store may be this process's: leave other machines the time to read the verdict
            time.sleep(2 * BEAT_S)
        self._stopping = True
        self._wake()
        self._thread.join()
        self._reports.stop()
        self.position.close()
        for neighbour in filter(None, self._neighbours.values()):
            neighbour.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    # ----------------------------------------------------------------------------------- the thread

    def _wake(self) -> None:
        os.write(self._wake_writer, b".")

    def _run(self) -> None:
        while not self._stopping:
            self._meet_neighbours()
            self._find_ended()
            if self._verdict is None:
                self._look()
            self._end_if_late()
            self._sample()

    def _look(self) -> None:
        before, self._looked = self._looked, time.monotonic()
        if self._looked - before > STOOD_STILL_S:
            self._reports.answered = self._looked
        newest = dict(self._reports.newest)
        if self._reports.verdict is not None:
            self._conclude(self._reports.verdict)
            return
        self._find_unread(newest)
        self._find_silent(newest)
        if self._rank == 0 and len(newest) == self._world_size:
            self._diagnose([newest[r].beat for r in range(self._world_size)])

    def _sample(self) -> None:
        """Look at the training thread for a second, or until a process of this machine ends."""
        poll = select.poll()
        for descriptor in (
            self._wake_reader,
            *(n.descriptor for n in self._neighbours.values() if n),
        ):
            poll.register(descriptor, select.POLLIN)
        self._samples = []
        all_met = len(self._neighbours) == self._world_size - 1
        for _ in range(_SAMPLES if all_met else 1):
            self._samples.append(self._waits()[0])
            if events := poll.poll(1000 * BEAT_S / _SAMPLES):
                if any(fd == self._wake_reader for fd, _ in events):
                    os.read(self._wake_reader, 100)
                return

    def _waits(self) -> tuple[str, str]:
        """Where the training thread waits for others, if it does, and the user's line it runs."""
        return read_frames(self._waits_in)

    def _waits_in(self, frames: dict[int, FrameType]) -> tuple[str, str]:
        frame, waits = frames.get(self._trained or 0), ""
        while frame is not None:
            file = frame.f_code.co_filename
            if file == distributed_c10d.__file__ or frame.f_code.co_name == "_meet":
                waits = ELSEWHERE
            elif file in _COMMUNICATORS and (not waits or frame.f_code.co_name == "agree"):
                waits = ENGINE
            if not file.startswith(_NOT_USER_CODE) and not file.startswith("<"):
                return waits, f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
            frame = frame.f_back
        return waits, ""

    def _beat(self) -> Beat:
        self._number += 1
        waits, code = self._waits()
        samples = self._samples or [waits]
        busy = sum(not w for w in samples) / len(samples)
        place, before = self.position.place(), self._reported
        self._reported = place
        trace = list(self.communicator.exchange_log.trace) if place == before else []
        device = self.device_waits.take() if self.device_waits is not None else None
        return Beat(
            self._number,
            self._machine,
            os.getpid(),
            self.position.descriptor,
            place,
            busy,
            waits,
            code,
            device,
            trace,
        )

    def _meet_neighbours(self) -> None:
        for rank, report in list(self._reports.newest.items()):
            if rank != self._rank and rank not in self._neighbours:
                self._neighbours[rank] = None
                if (beat := report.beat).machine == self._machine:
                    try:
                        self._neighbours[rank] = Neighbour(beat.pid, beat.descriptor, beat.place)
                    except ProcessLookupError:
                        self._take_end(rank, beat.place, None)
                    except OSError:
                        pass  # only silence will tell

    def _find_ended(self) -> None:
        for rank, neighbour in self._neighbours.items():
            if neighbour is not None and neighbour.ended:
                self._neighbours[rank] = None
                self._take_end(rank, neighbour.place(), neighbour.words)
                neighbour.close()
        for rank, place in self._over.items() if self._hurry else ():
            self._condemn(
                rank,
                f"Rank {rank} has ended its run before the others, its last step was {place.step}."
                " All ranks must take the same number of steps; look for loaders of different"
                " length.",
            )

    def _take_end(self, rank: int, place: Place, words: str | None) -> None:
        if not words and place.activity == Activity.ENDED:
            self._over[rank] = place
        elif words is None:
            self._unread[rank] = time.monotonic() + 2 * BEAT_S
            self._reports.hurry()
        else:
            end = "died without a word (killed, out of memory, or os._exit)"
            self._condemn(rank, words or f"Rank {rank} {end} in {self._describe(place)}.")

    def _find_unread(self, newest: dict[int, Report]) -> None:
        for rank, until in list(self._unread.items()):
            place = newest[rank].beat.place
            if place.activity == Activity.ENDED:
                self._over[rank] = place
                del self._unread[rank]
            elif time.monotonic() >= until:
                end = "ended; its own output says why, unless it was killed; it was last heard of"
                self._condemn(rank, f"Rank {rank} {end} in {self._describe(place)}.")

    def _find_silent(self, newest: dict[int, Report]) -> None:
        limit = 3 * BEAT_S if self._hurry else self._options.lost
        for rank, report in newest.items():
            if rank == self._rank:
                continue
            if report.beat.place.activity == Activity.ENDED:
                self._over[rank] = report.beat.place
            elif report.read - report.since > limit:
                self._condemn_silent(
                    rank,
                    report,
                    f"has not been heard of for {report.read - report.since:.0f} s",
                    "its",
                )
        silence = self._looked - self._reports.answered
        if silence > limit and 0 in newest and self._rank and 0 not in self._over:
            self._condemn_silent(
                0, newest[0], f"has not answered for {silence:.0f} s", "its store's"
            )

    def _condemn_silent(self, rank: int, report: Report, silence: str, whose: str) -> None:
        neighbour = self._neighbours.get(rank)
        place = neighbour.place() if neighbour is not None else report.beat.place
        self._condemn(
            rank,
            f"Rank {rank} on {report.beat.machine.split()[0]} {silence} ({whose} process is"
            f" stopped, or its machine or network is gone); it was in {self._describe(place)}.",
        )

    def _diagnose(self, beats: list[Beat]) -> None:
        # NCCL compares nothing, and whoever waits for the device never comes to the end of its
        # backward, where the engine does.
        if difference := first_difference(aligned(beats), self.communicator.exchange_log.describe):
            self._condemn(_NOBODY, f"In step {beats[0].place.step}: {difference}")
            return
        if pair := self._deadlock.find(beats):
            inside, outside = (
                f"rank {r} is in {self._describe(beats[r].place)} ({beats[r].code})" for r in pair
            )
            self._condemn(
                pair[1],
                f"The ranks wait for each other for ever: {inside}, {outside}. {LOOK_FOR}",
                stuck=True,
            )
        elif warning := self._standstill.find(beats, self.unit_name) or self._straggler.find(
            beats, self.unit_name
        ):
            with suppress(Warning):  # made an error, here where nobody sees it
                rank_zero_warn(warning)

    # ------------------------------------------------------------------------------------- verdicts

    def _condemn(self, rank: int, text: str, stuck: bool = False) -> None:
        if self._verdict is None:
            verdict = {"rank": rank, "text": text, "stuck": stuck}
            self._reports.send(verdict)
            self._conclude(verdict)

    def _conclude(self, verdict: dict[str, Any]) -> None:
        if self._verdict is not None:
            return
        self._verdict = verdict
        self.position.leave_words(verdict["text"])
        self._deadline = time.monotonic() + (0 if verdict.get("stuck") else self._options.grace)
        self._known.set()
        if verdict["rank"] != self._rank or verdict.get("stuck"):
            _say(self._message(verdict))

    def _end_if_late(self) -> None:
        if time.monotonic() < self._deadline or self._stopping:
            return
        stack = read_frames(
            lambda frames: (
                traceback.format_stack(frames[self._trained]) if self._trained in frames else []
            )
        )
        _say(
            f"Rank {self._rank} did not end by itself; its process is ended here:\n{''.join(stack)}"
        )
        os._exit(1)

    def _message(self, verdict: dict[str, Any]) -> str:
        here = self._describe(self.position.place())
        goes_on = (
            'with `ckpt_path="last"` a new run goes on from the last checkpoint, if one was saved'
        )
        return f"{verdict['text']} Rank {self._rank} ends too; it is in {here}; {goes_on}."

    def _describe(self, place: Place) -> str:
        return place.describe(self.unit_name)


class _Doing:
    """A context manager in two methods: it is entered several times per step."""

    def __init__(self, position: Position, activity: Activity) -> None:
        self._position, self._activity = position, activity

    def __enter__(self) -> None:
        self._before, self._position.activity = self._position.activity, self._activity

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._position.activity = self._before


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # a full disk, or closed: the watch goes on
        print(text, file=sys.stderr, flush=True)


def _is_about_a_connection(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _CONNECTION_WORDS)
