"""Records the exchanges of `zero3`'s ranks in a software graph, each as one call.

Communicators on the CPU number their exchanges, and use other memory for each. So the tensor
operations inside of an exchange cannot be repeated, but the exchange itself can: between the same
tensors, and in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from ...strategies.collectives import LocalCollectives

# Methods of a communicator; exchanges of Python objects, which no graph can hold, are not here.
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
    """Records calls of a program."""

    def record_call(self, run: Callable[[], Any], written: Sequence[Tensor]) -> Any:
        """Make a call, which writes to the tensors ``written``, and record it as one operation."""


class _RecordedWork:
    """A pending exchange. Waiting for it is recorded as a call of its own."""

    def __init__(self, works: list[Any], recorder: Recorder) -> None:
        # Each replay of the start puts a work here, and each replay of the wait removes it.
        self._works, self._recorder = works, recorder

    def wait(self) -> Any:
        """See :meth:`Work.wait`; the result lies in the same memory in each replay."""
        works = self._works
        return self._recorder.record_call(lambda: works.pop().wait(), [])


@contextmanager
def record_exchanges(communicator: LocalCollectives, recorder: Recorder) -> Iterator[None]:
    """Record in ``recorder`` the exchanges that the body makes with ``communicator``."""
    own_methods = {name: communicator.__dict__.get(name) for name in _EXCHANGES}
    running: list[str] = []  # the exchange that runs

    def make_recorded(name: str) -> Callable[..., Any]:
        real = getattr(communicator, name)

        def record_exchange(*args: Any) -> Any:
            if running:
                return real(*args)  # a part of the exchange that runs
            works: list[Any] = []

            def start() -> Any:
                running.append(name)
                try:
                    # Looked up again: in a replay the method may be one that takes the time.
                    result = getattr(communicator, name)(*args)
                finally:
                    running.pop()
                works[:] = [result] if hasattr(result, "wait") else []
                return result

            result = recorder.record_call(start, [a for a in args if isinstance(a, Tensor)])
            return _RecordedWork(works, recorder) if works else result

        return record_exchange

    replacements = {name: make_recorded(name) for name in _EXCHANGES}
    communicator.__dict__.update(replacements)
    try:
        yield
    finally:
        for name, own in own_methods.items():
            del communicator.__dict__[name]
            if own is not None:
                communicator.__dict__[name] = own
