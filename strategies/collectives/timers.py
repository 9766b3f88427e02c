"""Time between two marks, by CUDA events or by the host's clock, and the time of a communicator's
collectives.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .process_group import LocalCollectives


class HostClock:
    """Marks on the host, for runs without CUDA."""

    def mark(self) -> Any:
        """Now."""
        return time.perf_counter()

    def is_done(self, mark: Any) -> bool:
        """Whether the mark has been passed."""
        return True

    def between(self, first: Any, second: Any) -> float:
        """Seconds."""
        return second - first

    def recycle(self, *marks: Any) -> None:
        """These will not be asked again."""


class EventClock(HostClock):
    """Marks in the current CUDA stream; they are read when the device has passed them, and nothing
    waits.
    """

    def __init__(self) -> None:
        self._unused: list[torch.cuda.Event] = []  # creating one costs more than recording it

    def mark(self) -> Any:
        """See :meth:`HostClock.mark`; None during the capture of a CUDA graph, which would take the
        event with it.
        """
        if torch.cuda.is_current_stream_capturing():
            return None
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_done(self, mark: Any) -> bool:
        """See :meth:`HostClock.is_done`."""
        return mark.query()

    def between(self, first: Any, second: Any) -> float:
        """See :meth:`HostClock.between`."""
        return first.elapsed_time(second) / 1000

    def recycle(self, *marks: Any) -> None:
        """See :meth:`HostClock.recycle`."""
        self._unused.extend(marks)


def make_clock(device: torch.device) -> HostClock:
    """The clock of ``device``."""
    return EventClock() if device.type == "cuda" else HostClock()


class CallTimer:
    """Adds up the time of calls that start collectives.

    On CUDA that is the time between events before and after each collective in its own stream,
    waiting for other ranks included, whether or not anything is computed beside it; what a CUDA
    graph replays is not seen. On the CPU it is what the host spends on starting collectives and
    waiting for them; what passes while it computes does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = make_clock(device)
        self._on_host = type(self._clock) is HostClock
        self._spans: deque[tuple[Any, Any]] = deque()  # that the device may not have passed yet
        self._total_s = 0.0

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = self._clock.mark()
            result = method(*args, **kwargs)
            if begun is not None:
                self._spans.append((begun, self._clock.mark()))
                if len(self._spans) > 1000:  # nobody asks
                    self.seconds()
            if self._on_host and hasattr(result, "wait"):
                return SimpleNamespace(wait=self.timed(result.wait))
            return result

        return timed

    def seconds(self) -> float:
        """Of all collectives since this timer was made that the device has passed."""
        while self._spans and self._clock.is_done(self._spans[0][1]):
            begun, ended = self._spans.popleft()
            self._total_s += self._clock.between(begun, ended)
            self._clock.recycle(begun, ended)
        return self._total_s


class CollectiveTimer(CallTimer):
    """The time of the collectives that go through a communicator."""

    def __init__(self, communicator: LocalCollectives, device: torch.device) -> None:
        super().__init__(device)
        self.communicator = communicator
        # The units hold the communicator itself, so it is the communicator that changes.
        for name in (
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "all_reduce",
            *(["agree"] if self._on_host else []),
        ):
            setattr(communicator, name, self.timed(getattr(communicator, name)))
