"""The share of a step that this rank's device works and does not wait for other ranks' devices.

Hosts cannot tell which GPU is slow: each host waits for its own GPU, and all for as long. So about
once a second events in the compute stream mark the begin and the end of a step, and each place
where the stream waits for an exchange. Nothing waits for these events. Only the training thread
asks whether they have passed, between steps: a query from another thread might break the capture of
a CUDA graph. What a graph replays has no such places, and counts as work, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..collectives import HostClock
from ..engine import Zero3Engine
from ..engine.streams import Stream


def streams_of(engine: Zero3Engine) -> tuple[Stream, Stream]:
    """Return the side streams of ``engine`` that the compute stream waits for."""
    return engine.units[0]._stream, engine.reducer._stream


class DeviceWaits:
    """Measures a step after :meth:`read_share` has asked for one.

    Args:
        clock: makes marks that the device passes, and reads the time between two of them.
    """

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._is_requested = False
        self._streams: Sequence[Stream] = ()  # streams whose waits are marked in this step
        self._marks: list[Any] = []  # begin of the step, pairs around waits, end of the step
        self._share: float | None = None

    def read_share(self) -> float | None:
        """Return the share of a step that the device worked, and ask for another measurement.

        The share is 0 to 1; None if no step was measured since the last call. Any thread may call.
        """
        share, self._share, self._is_requested = self._share, None, True
        return share

    def begin_step(self, streams: Sequence[Stream]) -> None:
        """Begin, end or read a measurement; the training thread calls this between two steps.

        Args:
            streams: side streams that the compute stream will wait for.
        """
        if self._streams:
            self.end_step()
        elif self._marks:
            if self._clock.is_done(self._marks[-1]):
                self._share, self._marks = self._compute_share(), []
        elif self._is_requested:
            self._is_requested, self._marks, self._streams = False, [self._clock.mark()], streams
            for stream in streams:
                stream.join = self._mark_waits(stream.join)  # type: ignore[method-assign]

    def end_step(self) -> None:
        """End the measurement of a step: another step, or something else than training, follows."""
        if self._streams:
            for stream in self._streams:
                del stream.join  # the method of the class is visible again
            self._streams = ()
            self._marks.append(self._clock.mark())

    def _mark_waits(self, join: Callable[[Any], None]) -> Any:
        def join_and_mark(mark: Any) -> None:
            begin = self._clock.mark()
            join(mark)
            if begin is not None:  # None while a graph is being captured
                self._marks += [begin, self._clock.mark()]

        return join_and_mark

    def _compute_share(self) -> float:
        begin, *waits, end = self._marks
        waited = sum(
            self._clock.between(a, b) for a, b in zip(waits[::2], waits[1::2], strict=True)
        )
        total = self._clock.between(begin, end)
        self._clock.recycle(*self._marks)
        return 1.0 - waited / total if total > 0 else 1.0
