"""The position of each rank, in memory that other processes of the machine can read.

They can read it even after the process was killed.
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
# Indices of int64 cells at the begin of the memory.
_ACTIVITY, _STEP, _UNIT, _EXCHANGES, _MESSAGE_LENGTH = range(5)
_MESSAGE_START = 64  # bytes


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
    BETWEEN_VALIDATION = 11
    BETWEEN_TEST = 12
    BETWEEN_PREDICT = 13


_ACTIVITY_NAMES = {
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
    Activity.BETWEEN_VALIDATION: "validation, between batches (loading data, hooks)",
    Activity.BETWEEN_TEST: "test, between batches (loading data, hooks)",
    Activity.BETWEEN_PREDICT: "predict, between batches (loading data, hooks)",
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
        step: number of optimizer steps that the rank has done; -1 in a run without training.
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
        return _ACTIVITY_NAMES[self.activity] + (
            f", unit {unit_name(self.unit)}" if running else ""
        )

    def describe(self, unit_name: Callable[[int], str]) -> str:
        """Return the activity, the unit and the step in words."""
        step = f", step {self.step}" if self.step >= 0 else ""
        return f"{self.describe_activity(unit_name)}{step}"

    @property
    def moment(self) -> str:
        """The step in words, or the activity in a run without training."""
        return f"step {self.step}" if self.step >= 0 else _ACTIVITY_NAMES[self.activity]


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
        self.cells[_UNIT] = -1
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
        return Activity(self.cells[_ACTIVITY])

    @activity.setter
    def activity(self, activity: Activity) -> None:
        self.cells[_ACTIVITY] = activity

    def begin_run_without_training(self) -> None:
        """Write that this run has no steps."""
        self.cells[_STEP] = -1

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
    return Place(Activity(cells[_ACTIVITY]), cells[_STEP], cells[_UNIT], cells[_EXCHANGES])


def machine() -> str:
    """Name this machine; two processes get the same name if they see each other's process ids."""
    with suppress(OSError):
        # The host name alone is not enough: hosts may share one.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {os.getpid()}"


class Neighbour:
    """Another rank's process on this machine.

    Args:
        pid: id of the process.
        descriptor: descriptor of its :class:`Position` in that process.
        place: its place when it reported ``pid`` and ``descriptor``; used if its memory cannot be
            read because the process has ended since.

    Raises:
        ProcessLookupError: the process has ended and its parent has reaped it.
        OSError: the system has no ``pidfd_open``.
    """

    _memory: bytes | mmap.mmap  # empty if it cannot be read

    def __init__(self, pid: int, descriptor: int, place: Place) -> None:
        if not hasattr(os, "pidfd_open"):
            raise OSError("pidfd_open needs Linux 5.3")
        self.descriptor = os.pidfd_open(pid)  # becomes readable when the process has ended
        self._place, self._memory = place, b""
        # The descriptor may lead to another file, too small to map, or to none, if the process has
        # ended meanwhile.
        with suppress(OSError, ValueError):
            memory = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY)
            try:
                self._memory = mmap.mmap(memory, _BYTES, prot=mmap.PROT_READ)
            finally:
                os.close(memory)

    @property
    def message(self) -> str | None:
        """The message it left; empty if it left none, None if its memory cannot be read."""
        if not self._memory:
            return None
        length = memoryview(self._memory).cast("q")[_MESSAGE_LENGTH]
        message = self._memory[_MESSAGE_START : _MESSAGE_START + length]
        return message.decode(errors="replace")

    def place(self) -> Place:
        """Return its place of this moment, or the last one if the process has ended."""
        return _read_place(memoryview(self._memory).cast("q")) if self._memory else self._place

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Stop watching the process."""
        os.close(self.descriptor)
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()  # the map has a descriptor of its own
