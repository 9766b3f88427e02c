"""Clocks of the host and of CUDA devices, and the time that calls take by them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class HostClock:
    """Sets marks in the host's time, for runs without CUDA."""

    def mark(self) -> Any:
        """Return a mark of the current time."""
        return time.perf_counter()

    def is_done(self, mark: Any) -> bool:
        """Return whether the mark has been passed."""
        return True

    def between(self, first: Any, second: Any) -> float:
        """Return the seconds from ``first`` to ``second``."""
        return second - first


class EventClock(HostClock):
    """Sets marks in the current CUDA stream, to be read without a wait when the device is past."""

    def mark(self) -> Any:
        """See :meth:`HostClock.mark`; None while a CUDA graph is captured.

        The capture would make the event a part of the graph.
        """
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_done(self, mark: Any) -> bool:
        """See :meth:`HostClock.is_done`."""
        return mark.query()

    def between(self, first: Any, second: Any) -> float:
        """See :meth:`HostClock.between`."""
        return first.elapsed_time(second) / 1000


def make_clock(device: torch.device) -> HostClock:
    """Make the clock that suits ``device``."""
    return EventClock() if device.type == "cuda" else HostClock()


class CallTimer:
    """Adds up the time of calls that start collectives.

    On CUDA it adds the time between events before and after each collective in its own stream,
    waits for other ranks included, whether or not the device computes beside it; it does not see
    collectives that a CUDA graph replays. On the CPU it adds the time that the host spends on
    starting collectives and waiting for them; the time in which the host computes does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock = make_clock(device)
        self.on_host = type(self._clock) is HostClock
        self._spans: deque[tuple[Any, Any]] = deque()  # marks that the device may not have passed
        self._total_s = 0.0

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``method`` and adds the time to this timer."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock.mark()
            result = method(*args, **kwargs)
            if begin is not None:
                self._spans.append((begin, self._clock.mark()))
                if len(self._spans) > 1000:  # without a reader the deque would grow for ever
                    self.seconds()
            if self.on_host and hasattr(result, "wait"):
                return SimpleNamespace(wait=self.timed(result.wait))
            return result

        return call

    def seconds(self) -> float:
        """Return the time of all collectives that the device has passed since this timer began."""
        while self._spans and self._clock.is_done(self._spans[0][1]):
            begin, end = self._spans.popleft()
            self._total_s += self._clock.between(begin, end)
        return self._total_s
