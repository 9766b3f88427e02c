"""How much of a step this rank's device works, and how much it waits for the devices of other
ranks.

Hosts cannot tell which GPU is slow: each waits for its own, and all for as long. So about once a
second events in the compute stream mark the begin and the end of a step, and each place where the
stream waits for an exchange. Nothing waits for them. Only the training thread asks whether they
have passed, between steps: from another thread that might break the capture of a CUDA graph. What a
graph replays has no such places, and counts as work, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..collectives import HostClock
from ..engine import Zero3Engine
from ..engine.streams import Stream


def streams_of(engine: Zero3Engine) -> tuple[Stream, Stream]:
    """The side streams that the compute stream waits for."""
    return engine.units[0]._stream, engine.reducer._stream


class DeviceWaits:
    """Looks at a step when somebody has asked.

    Args:
        clock: whose marks the device passes.
    """

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock
        self._wanted = False
        self._streams: Sequence[Stream] = ()  # whose waits are marked in this step
        self._marks: list[Any] = []  # begin, pairs around waits, end
        self._working: float | None = None

    def take(self) -> float | None:
        """Share of a step that the device worked, 0 to 1; None if none was measured since the last
        call. On any thread.
        """
        working, self._working, self._wanted = self._working, None, True
        return working

    def begin_step(self, streams: Sequence[Stream]) -> None:
        """Between two steps, on the training thread.

        Args:
            streams: that the compute stream will wait for.
        """
        if self._streams:
            self.end_step()
        elif self._marks:
            if self._clock.is_done(self._marks[-1]):
                self._working, self._marks = self._read(), []
        elif self._wanted:
            self._wanted, self._marks, self._streams = False, [self._clock.mark()], streams
            for stream in streams:
                stream.join = self._marked(stream.join)  # type: ignore[method-assign]

    def end_step(self) -> None:
        """What follows is no training, or another step."""
        if self._streams:
            for stream in self._streams:
                del stream.join  # the class's appears again
            self._streams = ()
            self._marks.append(self._clock.mark())

    def _marked(self, join: Callable[[Any], None]) -> Callable[[Any], None]:
        def marked(mark: Any) -> None:
            begun = self._clock.mark()
            join(mark)
            if begun is not None:  # no graph is being captured
                self._marks += [begun, self._clock.mark()]

        return marked

    def _read(self) -> float:
        begin, *waits, end = self._marks
        waited = sum(
            self._clock.between(a, b) for a, b in zip(waits[::2], waits[1::2], strict=True)
        )
        whole = self._clock.between(begin, end)
        self._clock.recycle(*self._marks)
        return 1.0 - waited / whole if whole > 0 else 1.0
