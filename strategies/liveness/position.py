"""Where each rank is: in memory that the other processes of the machine can read, even after this
one was killed.
"""

from __future__ import annotations

import enum
import mmap
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_BYTES = mmap.PAGESIZE
_ACTIVITY, _STEP, _UNIT, _EXCHANGES, _WORDS_LENGTH = range(5)
_WORDS_START = 64


class Activity(enum.IntEnum):
    """What a rank does, as far as the strategy can see."""

    SETUP = 0
    BETWEEN = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    VALIDATION = 5
    TEST = 6
    PREDICT = 7
    SAVING = 8
    LOADING = 9
    ENDED = 10


_WORDS = {
    Activity.SETUP: "set-up",
    Activity.BETWEEN: "the loop between steps (loading data, callbacks)",
    Activity.FORWARD: "forward",
    Activity.BACKWARD: "backward",
    Activity.OPTIMIZER: "the optimizer step",
    Activity.VALIDATION: "validation",
    Activity.TEST: "test",
    Activity.PREDICT: "predict",
    Activity.SAVING: "saving a checkpoint",
    Activity.LOADING: "loading a checkpoint",
    Activity.ENDED: "the end of its run",
}
_RUNS_UNITS = (
    Activity.FORWARD,
    Activity.BACKWARD,
    Activity.VALIDATION,
    Activity.TEST,
    Activity.PREDICT,
)


@dataclass(frozen=True)
class Place:
    """A position at one moment.

    Attributes:
        activity: what the rank does.
        step: optimizer steps it has done.
        unit: index of the unit that was asked for last; -1 before the first.
        exchanges: of the engine, that it has begun; all ranks begin the same ones.
    """

    activity: Activity
    step: int
    unit: int
    exchanges: int

    def where(self, unit_name: Callable[[int], str]) -> str:
        """Activity and unit."""
        running = self.unit >= 0 and self.activity in _RUNS_UNITS
        return _WORDS[self.activity] + (f", unit {unit_name(self.unit)}" if running else "")

    def describe(self, unit_name: Callable[[int], str]) -> str:
        """Activity, unit and step."""
        return f"{self.where(unit_name)}, step {self.step}"


class Position:
    """This rank's place. Writing it is a store to memory, no call: it may change many times per
    step.
    """

    def __init__(self) -> None:
        # Neither a file to leave behind nor a process to clean up: the memory lives as long as
        # somebody has it open.
        self.descriptor = os.memfd_create("lightning_zero3") if hasattr(os, "memfd_create") else -1
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, _BYTES)
        self._memory = mmap.mmap(self.descriptor, _BYTES)
        self.cells = memoryview(self._memory).cast("q")
        self.cells[_UNIT] = -1
        # what the engine writes: unit, exchanges
        self.progress = self.cells[_UNIT : _EXCHANGES + 1]

    def close(self) -> None:
        """Others keep what they have opened."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def activity(self) -> Activity:
        """What this rank does."""
        return Activity(self.cells[_ACTIVITY])

    @activity.setter
    def activity(self, activity: Activity) -> None:
        self.cells[_ACTIVITY] = activity

    def begin_step(self, step: int) -> None:
        """After ``step`` optimizer steps."""
        self.cells[_STEP], self.cells[_ACTIVITY] = step, Activity.BETWEEN

    def leave_words(self, words: str) -> None:
        """What the others are to know about the end of this run."""
        data = words.encode()[: _BYTES - _WORDS_START]
        self._memory[_WORDS_START : _WORDS_START + len(data)] = data
        self.cells[_WORDS_LENGTH] = len(data)

    def place(self) -> Place:
        """Now."""
        return _read(self.cells)


def _read(cells: memoryview) -> Place:
    return Place(Activity(cells[_ACTIVITY]), cells[_STEP], cells[_UNIT], cells[_EXCHANGES])


def machine() -> str:
    """The same for two processes that can see each other's process ids."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # hosts may share a name
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {os.getpid()}"


class Neighbour:
    """Another rank's process on this machine.

    Args:
        pid: of the process.
        descriptor: of its :class:`Position`.
        place: where it was when it told these, in case it has ended since.

    Raises:
        ProcessLookupError: it has ended, and nobody waits for it.
        OSError: the system does not offer this.
    """

    def __init__(self, pid: int, descriptor: int, place: Place) -> None:
        if not hasattr(os, "pidfd_open"):
            raise OSError("pidfd_open needs Linux 5.3")
        self.descriptor = os.pidfd_open(pid)  # readable when the process has ended
        self._place, self._memory = place, b""
        with suppress(OSError, ValueError):  # another file, if the process has ended meanwhile
            memory = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
            try:
                self._memory = mmap.mmap(memory, _BYTES, prot=mmap.PROT_READ)
            finally:
                os.close(memory)

    @property
    def words(self) -> str | None:
        """See :meth:`Position.leave_words`; empty if it left none, None if they cannot be read."""
        if not self._memory:
            return None
        length = memoryview(self._memory).cast("q")[_WORDS_LENGTH]
        return self._memory[_WORDS_START : _WORDS_START + length].decode(errors="replace")

    def place(self) -> Place:
        """Now, or when it ended."""
        return _read(memoryview(self._memory).cast("q")) if self._memory else self._place

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Stop watching."""
        os.close(self.descriptor)
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()  # it has a descriptor, too
