"""The position of each rank, in memory that other processes of the machine can read.

They can read it even after the process was killed.
"""

from __future__ import annotations

import enum
import mmap
import os
import secrets
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_BYTES = mmap.PAGESIZE
# Indices of int64 cells at the begin of the memory.
_ACTIVITY, _STEP, _UNIT, _EXCHANGES, _MESSAGE_LENGTH = range(5)
_MESSAGE_START = 64  # bytes


class Activity(enum.IntEnum):
    """What a rank does, as far as the strategy can see: numbers, each with its words."""

    words: str

    SETUP = "set-up"
    BETWEEN = "the loop between steps (loading data, callbacks)"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "the optimizer step"
    VALIDATION = "validation"
    TEST = "test"
    PREDICT = "predict"
    SAVING = "saving a checkpoint"
    LOADING = "loading a checkpoint"
    ENDED = "the end of its run"
    BETWEEN_VALIDATION = "validation, between batches (loading data, hooks)"
    BETWEEN_TEST = "test, between batches (loading data, hooks)"
    BETWEEN_PREDICT = "predict, between batches (loading data, hooks)"

    def __new__(cls, words: str) -> Activity:
        """Make the member, an int that counts them from 0."""
        member = int.__new__(cls, len(cls.__members__))
        member._value_, member.words = int(member), words
        return member


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
        step: number of optimizer steps that the rank has done; -1 before training.
        unit: index of the unit that the engine was last asked for; -1 before the first.
        exchanges: number of the engine's exchanges that the rank has begun; all ranks begin the
            same ones.
    """

    activity: Activity
    step: int
    unit: int
    exchanges: int

    def describe_activity(self, unit_name: Callable[[int], str]) -> str:
        """Return the activity and the unit in words."""
        running = self.unit >= 0 and self.activity in _RUNS_UNITS
        return self.activity.words + (f", unit {unit_name(self.unit)}" if running else "")

    def describe(self, unit_name: Callable[[int], str]) -> str:
        """Return the activity, the unit and the step in words."""
        step = f", step {self.step}" if self.step >= 0 else ""
        return f"{self.describe_activity(unit_name)}{step}"

    @property
    def moment(self) -> str:
        """The step in words, or the activity before training."""
        return f"step {self.step}" if self.step >= 0 else self.activity.words


class Position:
    """This rank's place, as a page of shared memory.

    A write is a store to memory and no system call: the place may change many times per step.
    """

    def __init__(self) -> None:
        # memfd leaves no file behind and needs no process to clean up: the memory lives as long as
        # a process has it open.
        self.descriptor = os.memfd_create("lightning_zero3") if hasattr(os, "memfd_create") else -1
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, _BYTES)
        self._memory = mmap.mmap(self.descriptor, _BYTES)
        self.cells = memoryview(self._memory).cast("q")
        self.cells[_STEP] = self.cells[_UNIT] = -1
        # The cells that the engine writes: unit and exchanges.
        self.progress = self.cells[_UNIT : _EXCHANGES + 1]

    def close(self) -> None:
        """Close the descriptor; processes that have opened the memory keep it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def activity(self) -> Activity:
        """What this rank does."""
        return Activity(self.cells[_ACTIVITY])  # type: ignore[arg-type]  # of the members' numbers

    @activity.setter
    def activity(self, activity: Activity) -> None:
        self.cells[_ACTIVITY] = activity

    def begin_step(self, step: int) -> None:
        """Write that this rank has done ``step`` optimizer steps and is between two."""
        self.cells[_STEP], self.cells[_ACTIVITY] = step, Activity.BETWEEN

    def leave_message(self, message: str) -> None:
        """Leave other ranks a message about the end of this run, cut to the size of the page."""
        data = message.encode()[: _BYTES - _MESSAGE_START]
        self._memory[_MESSAGE_START : _MESSAGE_START + len(data)] = data
        self.cells[_MESSAGE_LENGTH] = len(data)

    def place(self) -> Place:
        """Return the place of this moment."""
        return _read_place(self.cells)


def _read_place(cells: memoryview) -> Place:
    activity = Activity(cells[_ACTIVITY])  # type: ignore[arg-type]  # see above
    return Place(activity, cells[_STEP], cells[_UNIT], cells[_EXCHANGES])


def _machine() -> str:
    """Name this machine; two processes get the same name if they see each other's process ids."""
    with suppress(OSError):
        # The host name alone is not enough: hosts may share one.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {os.getpid()}"


class Card(NamedTuple):
    """Where a rank is to be found, which the ranks tell each other before they watch.

    Attributes:
        run: random name of the run, of which rank 0's counts.
        machine: name of its machine, by which processes know those whose end they can see.
        pid: id of its process.
        descriptor: descriptor of its :class:`Position` in that process.
    """

    run: str
    machine: str
    pid: int
    descriptor: int

    @staticmethod
    def of(position: Position) -> Card:
        """Return this process's card."""
        return Card(secrets.token_hex(), _machine(), os.getpid(), position.descriptor)


class Neighbour:
    """Another rank's process on this machine.

    Args:
        card: of that rank, whose process still runs.

    Raises:
        AttributeError, OSError, ValueError: the process cannot be looked into, or the system has no
            ``pidfd_open``.
    """

    def __init__(self, card: Card) -> None:
        memory = os.open(f"/proc/{card.pid}/fd/{card.descriptor}", os.O_RDONLY)
        try:
            self._memory = mmap.mmap(memory, _BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(memory)
        self._cells = memoryview(self._memory).cast("q")
        self._status = Path(f"/proc/{card.pid}/stat")
        self.descriptor = os.pidfd_open(card.pid)  # becomes readable when the process has ended

    @property
    def message(self) -> str:
        """The message it left; empty if it left none."""
        end = _MESSAGE_START + self._cells[_MESSAGE_LENGTH]
        return self._memory[_MESSAGE_START:end].decode(errors="replace")

    def place(self) -> Place:
        """Return its place of this moment, or the last one if the process has ended."""
        return _read_place(self._cells)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def can_run(self) -> bool:
        """Whether the process runs or sleeps: it is not stopped, in a wait for a dead disk or gone.

        One that runs and yet does not report has a thread that keeps Python's lock.
        """
        with suppress(OSError):
            # The name of the program stands before, in brackets, and may have any characters.
            return self._status.read_text(errors="replace").rpartition(") ")[2][0] in "RSI"
        return False

    def close(self) -> None:
        """Stop watching the process."""
        os.close(self.descriptor)
