"""The watchdog: a thread beside training that names each rank that dies, raises, hangs or is slow.

Each rank reports once a second to the store through which the processes met. The training thread
exchanges nothing for this; it only writes its position to memory. Processes of one machine see each
other's end at once and read where it happened.
"""

from __future__ import annotations

import faulthandler
import os
import select
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import lightning
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..collectives import (
    DivergenceError,
    LocalCollectives,
    first_difference,
    process_group,
)
from ..collectives.exchange_log import LOOK_FOR
from ..communicators import shared_memory
from ..support import printable
from ..support.thread_stacks import read_frames
from .diagnosis import ELSEWHERE, ENGINE, Beat, Standstill, Straggler, align_traces
from .heartbeats import BEAT_S, SUSPENDED_S, Report, Reports, Verdict, first_line, print_error
from .position import Activity, Card, Neighbour, Place, Position

_NO_RANK = -1  # in a verdict: no single rank is its cause
_SAMPLES = 10  # looks at the training thread for each beat
_INSTALLED = [os.path.dirname(package.__path__[0]) for package in (torch, lightning)]
_STRATEGIES = os.path.dirname(os.path.dirname(__file__))
_OURS = _STRATEGIES, os.path.join(os.path.dirname(_STRATEGIES), "callbacks")
_NOT_USER_CODE = (
    "<",  # made by `exec`
    *(
        os.path.join(folder, "")
        for folder in (*_INSTALLED, *_OURS, os.path.dirname(threading.__file__))
    ),
)
_COMMUNICATORS = tuple(module.__file__ for module in (process_group, shared_memory))
_CONNECTION_WORDS = ("gloo", "connection", "nccl", "socket", "broken pipe", "timed out", "timeout")


def user_line(frame: FrameType, number: int) -> str:
    """Describe a line of the user's; empty if the frame is not of the user's code."""
    file = frame.f_code.co_filename
    return "" if file.startswith(_NOT_USER_CODE) else f"{file}:{number} in {frame.f_code.co_name}"


@dataclass(frozen=True)
class WatchOptions:
    """Time limits after which a rank counts as slow or lost, in seconds.

    Attributes:
        slow: a warning names a rank that holds the others up over so long a time, or all ranks if
            they wait at different places over so long a time.
        lost: a rank of another machine that has not reported for so long is taken for dead, and so
            is one of this machine whose process is stopped. Where that process runs, as in a call
            that keeps Python's lock, a warning names it. A process that ends is found at once.
        grace: so long after another rank's end this one may take to raise; then the watchdog ends
            its process. One that has raised has ``lost`` to end (loggers may upload).

    Raises:
        ValueError: a limit is not positive, or ``lost`` is shorter than five reports take.
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
    """The watchdog of one rank: its thread, its position, and what it knows of the other ranks.

    Args:
        options: time limits.
        store: keys and values of this run alone.
        rank: this rank.
        cards: of all ranks, in rank order.
        position: where the training thread writes what it does; ``cards[rank]`` tells of it.

    Attributes:
        unit_name: from the index of a unit to its name, for messages.
        communicator: the communicator whose exchanges this rank reports.
    """

    def __init__(
        self,
        options: WatchOptions,
        store: dist.Store,
        rank: int,
        cards: Sequence[Card],
        position: Position,
    ) -> None:
        self.position = position
        self.unit_name: Callable[[int], str] = str
        self.communicator = LocalCollectives()
        self._options, self._rank, self._cards = options, rank, cards
        # hazard: on a shared connection a beat would wait while the training thread waits there.
        # (torch's stub lacks the method)
        self._roll_calls, self._roll_call_store = 0, store.clone()  # type: ignore[attr-defined]
        self._number, self._samples = 0, [ELSEWHERE]
        self._last_place: Place | None = None  # as reported last
        self._training_thread = threading.current_thread().ident
        self._neighbours: dict[int, Neighbour] = {}  # processes of this machine, until they end
        for other, card in enumerate(cards):
            if other != rank and card.machine == cards[rank].machine:
                # Of one that cannot be looked into the silence tells.
                with suppress(AttributeError, OSError, ValueError):
                    self._neighbours[other] = Neighbour(card)
        self._warned_of: dict[int, Report] = {}  # silent rank -> its last report
        self._finished: dict[int, Place] = {}  # ranks whose run has ended well -> last place
        self._standstill, self._straggler = Standstill(options.slow), Straggler(options.slow)
        self._verdict: Verdict | None = None  # why the run ends
        self._deadline = float("inf")  # when this process is ended
        self._verdict_event = threading.Event()
        self._needs_verdict = False  # the training thread waits for it
        self._is_stopping, self._last_check = False, time.monotonic()
        self._reports = Reports(store, rank, len(cards))
        self._thread = threading.Thread(target=self._run, name="lightning_zero3.watch", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------ training thread

    def report_error(self, error: BaseException) -> None:
        """Tell the other ranks that this rank's run ends with ``error``.

        If another rank caused ``error``, its message is changed to name that rank instead.
        """
        # hazard: what follows, and the clean-up of this rank (loggers that upload, waits for the
        # others), may take longer than the grace, which is there to raise.
        self._deadline = time.monotonic() + self._options.lost
        if isinstance(error, DivergenceError):
            lines = [user_line(frame, at) for frame, at in traceback.walk_tb(error.__traceback__)]
            here = [f"\nRank {self._rank} is at {line}." for line in lines if line][-1:]
            error.args = ("".join([f"In {self.position.place().moment}: {error}", *here]),)
        elif _is_connection_error(error) and (cause := self._wait_for_cause()):
            error.args = (cause,)
            return
        self._give_verdict(
            self._rank,
            f"Rank {self._rank} raised {first_line(error)!r} in"
            f" {self._describe_place(self.position.place())}.",
        )

    def all_end_with(self, error: BaseException) -> bool:
        """Return whether all ranks call this within two seconds with such an error at one place.

        The class of the error, the step and the number of exchanges must be the same. All ranks get
        the same answer; False if the store is gone.
        """
        self._roll_calls += 1
        place, store = self.position.place(), self._roll_call_store
        call = f"roll call {self._roll_calls}"
        mine = f"{type(error).__name__} {place.step} {place.exchanges}"
        keys = [f"{call}, rank {rank}" for rank in range(len(self._cards))]
        try:
            store.set(keys[self._rank], mine)
            # hazard: ranks that did not fail never come, so the wait has a limit.
            with suppress(dist.DistStoreError):
                store.wait(keys, timedelta(seconds=2 * BEAT_S))
            answers = [store.get(key).decode() for key in keys if store.check([key])]
            is_alike = "alike" if answers == [mine] * len(keys) else "apart"
            # hazard: ranks may find different answers, as a late one may come in between; the first
            # that is stored is the answer of all.
            return store.compare_set(call, "", is_alike) == b"alike"
        except RuntimeError:  # the store is gone, with the rank that held it
            return False

    def _wait_for_cause(self) -> str:
        """Wait some seconds for a verdict and return it as a message.

        The message is "" if none comes, or this rank is its cause.
        """
        self._needs_verdict = True
        self._reports.request_all()
        self._verdict_event.wait(min(self._options.lost, 6 * BEAT_S))
        if self._verdict is None or self._verdict.rank == self._rank:
            return ""
        return self._describe_verdict(self._verdict)

    def stop(self) -> None:
        """Stop watching; the run ends on this rank."""
        self.position.activity = Activity.ENDED
        if self._rank == 0 and self._verdict and len({card.machine for card in self._cards}) > 1:
            # hazard: the store may end with this process. Other machines need time to read the
            # verdict there.
            time.sleep(2 * BEAT_S)
        self._is_stopping = True
        self._thread.join()
        self._reports.stop()
        self.position.close()
        for neighbour in self._neighbours.values():
            neighbour.close()

    # ----------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self._sample_training_thread()
                self._reports.send(self._make_beat())
                self._find_ended_processes()
                if self._verdict is None:
                    self._check_reports()
            except Exception as error:
                # The other ranks would not hear that this one looks after nobody any more.
                if self._verdict is None:
                    traceback.print_exc()
                self._give_verdict(
                    self._rank,
                    f"Rank {self._rank} has stopped watching: its watch (not its model) raised"
                    f" {first_line(error)!r}; its own output says where.",
                )
                time.sleep(BEAT_S / _SAMPLES)
            self._end_process_if_late()
        self._reports.send(self._make_beat())

    def _check_reports(self) -> None:
        last_check, self._last_check = self._last_check, time.monotonic()
        if self._last_check - last_check > SUSPENDED_S:
            self._reports.forgive(self._last_check)
        newest = dict(self._reports.newest)
        if self._reports.verdict is not None:
            self._accept_verdict(self._reports.verdict)
            return
        self._find_silent_ranks(newest)
        if self._rank == 0 and len(newest) == len(self._cards):
            self._diagnose([newest[rank].beat for rank in range(len(newest))])

    def _sample_training_thread(self) -> None:
        """Sample the training thread for a second, or until the loop has something to do."""
        poll = select.poll()
        for neighbour in self._neighbours.values():
            poll.register(neighbour.descriptor, select.POLLIN)
        self._samples = []
        for _ in range(_SAMPLES):
            self._samples.append(self._read_training_thread()[0])
            if poll.poll(1000 * BEAT_S / _SAMPLES) or self._is_stopping or self._needs_verdict:
                return

    def _read_training_thread(self) -> tuple[str, str]:
        """Return where the training thread waits for other ranks and the user's line that it runs.

        The first is ENGINE, ELSEWHERE or "".
        """
        return read_frames(self._find_wait)

    def _find_wait(self, frames: dict[int, FrameType]) -> tuple[str, str]:
        frame, waits = frames.get(self._training_thread or 0), ""
        # Frames go outwards. A collective of torch, or `ProcessStrategy._meet`, waits outside the
        # engine; a communicator waits in it, and so does its `agree`, which calls torch's.
        while frame is not None:
            file = frame.f_code.co_filename
            if file == distributed_c10d.__file__ or frame.f_code.co_name == "_meet":
                waits = ELSEWHERE
            elif file in _COMMUNICATORS and (not waits or frame.f_code.co_name == "agree"):
                waits = ENGINE
            if line := user_line(frame, frame.f_lineno):
                return waits, line
            frame = frame.f_back
        return waits, ""

    def _make_beat(self) -> Beat:
        self._number += 1
        waits, code = self._read_training_thread()
        busy = sum(not w for w in self._samples) / len(self._samples)
        place, last_place = self.position.place(), self._last_place
        self._last_place = place
        trace = list(self.communicator.exchange_log.trace) if place == last_place else []
        return Beat(self._number, place, busy, waits, code, trace)

    def _find_ended_processes(self) -> None:
        for rank, neighbour in list(self._neighbours.items()):
            if neighbour.has_ended:
                place, message = neighbour.place(), neighbour.message
                del self._neighbours[rank]
                neighbour.close()
                if not message and place.activity == Activity.ENDED:
                    self._finished[rank] = place
                else:
                    end = "died without a word (killed, out of memory, or os._exit)"
                    self._give_verdict(
                        rank, message or f"Rank {rank} {end} in {self._describe_place(place)}."
                    )
        for rank, place in self._finished.items() if self._needs_verdict else ():
            self._give_verdict(
                rank,
                f"Rank {rank} has ended its run before the others, after {place.moment}."
                "\nAll ranks must take the same number of steps; look for loaders of different"
                " length, and for what another rank does alone (`strategy.gathered` is for that).",
            )

    def _find_silent_ranks(self, newest: dict[int, Report]) -> None:
        limit = 3 * BEAT_S if self._needs_verdict else self._options.lost
        for rank, report in newest.items():
            silence = self._last_check - report.since
            if rank == self._rank:
                continue
            if report.beat.place.activity == Activity.ENDED:
                self._finished[rank] = report.beat.place
            elif silence > limit:
                neighbour = self._neighbours.get(rank)
                if neighbour is not None and neighbour.can_run:
                    self._warn_of_silence(rank, report, neighbour.place())
                    continue
                place = neighbour.place() if neighbour is not None else report.beat.place
                # It may have left since where it was when it was heard of.
                where = "it is" if neighbour is not None else "it last said that it was"
                self._give_verdict(
                    rank,
                    f"Rank {rank} on {self._cards[rank].machine.split()[0]} has not been heard of"
                    f" for {silence:.0f} s (its process or the store's is stopped, or its machine"
                    f" or network is gone); {where} in {self._describe_place(place)}.",
                )

    def _warn_of_silence(self, rank: int, report: Report, place: Place) -> None:
        """Warn once, on one rank, of a process of this machine that runs and does not report."""
        silence = self._last_check - report.since
        is_speaker = self._rank == (1 if rank == 0 else 0)
        if is_speaker and silence > self._options.lost and report != self._warned_of.get(rank):
            self._warned_of[rank] = report
            self._warn(
                f"Rank {rank} has not reported for {silence:.0f} s, but its process runs: some call"
                " keeps Python's lock (json or pickle of much data, a C extension). It is in"
                f" {self._describe_place(place)}."
            )

    def _warn(self, text: str) -> None:
        # `warnings.simplefilter("error")` raises it, here where an error would end the watch.
        with suppress(Warning):
            warnings.warn(printable(text), stacklevel=2)

    def _diagnose(self, beats: list[Beat]) -> None:
        # NCCL does not compare what ranks exchange. The engine does so at the end of its backward,
        # which a rank that waits for the device never reaches.
        describe = self.communicator.exchange_log.describe
        if difference := first_difference(align_traces(beats), describe):
            self._give_verdict(_NO_RANK, f"In {beats[0].place.moment}: {difference}")
            return
        found = self._standstill.find(beats, self.unit_name)
        if isinstance(found, tuple):
            inside, outside = (
                f"rank {r} is in {self._describe_place(beats[r].place)} ({beats[r].code})"
                for r in found
            )
            self._give_verdict(
                found[1],
                f"The ranks wait for each other for ever: {inside}, {outside}.{LOOK_FOR}",
                stuck=True,
            )
        elif warning := found or self._straggler.find(beats, self.unit_name):
            self._warn(warning)

    # ------------------------------------------------------------------------------------- verdicts

    def _give_verdict(self, rank: int, text: str, stuck: bool = False) -> None:
        """Send all ranks the verdict that the run ends, unless there is one; see `Verdict`."""
        if self._verdict is None:
            verdict = Verdict(rank, text, stuck)
            self._reports.send_verdict(verdict)
            self._accept_verdict(verdict)

    def _accept_verdict(self, verdict: Verdict) -> None:
        if self._verdict is not None:
            return
        # what happened, and perhaps a line that says what to do
        text = "\n".join(map(printable, verdict.text.split("\n", 1)))
        self._verdict = verdict = verdict._replace(text=text)
        self.position.leave_message(text)
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + (0 if verdict.stuck else self._options.grace)
        self._verdict_event.set()
        if verdict.rank != self._rank or verdict.stuck:
            print_error(self._describe_verdict(verdict))

    def _end_process_if_late(self) -> None:
        if time.monotonic() < self._deadline or self._is_stopping:
            return
        print_error(f"Rank {self._rank} did not end by itself; its process is ended here:")
        faulthandler.dump_traceback(2)
        os._exit(1)

    def _describe_verdict(self, verdict: Verdict) -> str:
        place, hint = self.position.place(), ""
        if place.step >= 0:
            hint = (
                '; with `ckpt_path="last"` a new run goes on from the last checkpoint, if one was'
                " saved"
            )
        here = self._describe_place(place)
        happened, newline, advice = verdict.text.partition("\n")
        end = f"Rank {self._rank} ends too; it is in {here}{hint}."
        return f"{happened} {end}{newline}{advice}"

    def _describe_place(self, place: Place) -> str:
        return place.describe(self.unit_name)


def _is_connection_error(error: BaseException) -> bool:
    text = f"{type(error).__name__} {error}".lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _CONNECTION_WORDS)
