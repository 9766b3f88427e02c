"""The exchanges of `zero3`'s ranks inside of a software graph: each is one recorded call, whatever
the communicator does for it.

Doors on the CPU number their exchanges, and use other memory for each: the tensor operations inside
of one cannot be repeated, but the exchange itself can, between the same tensors and in the same
order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from ...strategies.collectives import LocalCollectives

# Not those of Python objects, which a graph cannot hold.
_EXCHANGES = (
    "all_gather",
    "reduce_scatter",
    "reduce_scatter_in",
    "all_to_all",
    "all_reduce",
    "broadcast",
    "meet",
)


class Recorder(Protocol):
    """Notes calls of a program."""

    def call(self, run: Callable[[], Any], written: Sequence[Tensor]) -> Any:
        """Make a call, which writes to tensors, and note it as a whole."""


class _Recorded:
    """A pending exchange, whose end is a call of its own."""

    def __init__(self, started: list[Any], recorder: Recorder) -> None:
        self._started, self._recorder = started, recorder

    def wait(self) -> Any:
        """See :meth:`Work.wait`; the result lies in the same memory in each replay."""
        started = self._started
        return self._recorder.call(lambda: started.pop().wait(), [])


@contextmanager
def record_exchanges(communicator: LocalCollectives, recorder: Recorder) -> Iterator[None]:
    """Inside, what goes through ``communicator`` is noted by ``recorder``."""
    before = {name: communicator.__dict__.get(name) for name in _EXCHANGES}
    inside: list[str] = []  # exchanges that run

    def recorded(name: str) -> Callable[..., Any]:
        real = getattr(communicator, name)

        def call(*args: Any) -> Any:
            if inside:
                return real(*args)  # a part of another one
            started: list[Any] = []

            def start() -> Any:
                inside.append(name)
                try:
                    # what it is in a replay: it may be timed then
                    result = getattr(communicator, name)(*args)
                finally:
                    inside.pop()
                started[:] = [result] if hasattr(result, "wait") else []
                return result

            result = recorder.call(start, [a for a in args if isinstance(a, Tensor)])
            return _Recorded(started, recorder) if started else result

        return call

    replacements = {name: recorded(name) for name in _EXCHANGES}
    communicator.__dict__.update(replacements)
    try:
        yield
    finally:
        for name, own in before.items():
            del communicator.__dict__[name]
            if own is not None:
                communicator.__dict__[name] = own
