"""What the engine notes in Python during a step, for steps that run as captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import increment_version

from .engine import Zero3Engine
from .unit import Phase


class ReplayedStep:
    """The books of one captured forward and backward.

    A graph repeats what the device did in the capture, unshards and reductions included. That is
    right only if the slots hold what they held then, nothing is on its way, and the gradients are
    to be added to; and afterwards the engine must know what the slots hold now. So each capture and
    each replay stands between a ``begin_`` and an ``end_`` of this object.
    """

    def __init__(self, engine: Zero3Engine) -> None:
        self._engine = engine
        engine.reducer.lasting = True
        engine.expect_graphs()
        # units in slots after the forward, after the backward
        self._filled: list[list[int]] = [
            [],
            [],
        ]
        self._used: list[int] = []  # numbers of the parameters that get a gradient
        # buffers that forward, that backward writes to
        self._written: list[list[Tensor]] = [
            [],
            [],
        ]

    def begin_forward(self) -> None:
        """The slots are empty: units that an earlier micro-batch has left there are gathered
        again.
        """
        self._engine.open_step()
        self._fill([])

    @contextmanager
    def capture_forward(self) -> Iterator[None]:
        """Inside of the graph."""
        versions = self._engine.buffers.versions()
        yield
        self._end_capture(0, versions)

    def end_forward(self) -> None:
        """The graph was replayed."""
        self._note(0)

    def open_backward(self) -> None:
        """Inside of ``engine.backward()``, which goes on to end the pass; autograd's run, of a copy
        of the loss, does not.
        """
        self._engine.passes.begin(silent=True)

    def begin_backward(self, parameters: list[Tensor]) -> None:
        """That run is over."""
        self._fill(self._filled[0])  # a hook of the user's may have run units since
        for chunk in self._engine.gradients.chunks:
            chunk.gradients_or_zeros()  # the graph adds to them
        for number in self._used:
            self._engine.gradients.used[number] = 1

    @contextmanager
    def capture_backward(self, parameters: list[Tensor]) -> Iterator[None]:
        """Inside of the graph, around autograd's pass: what the other ranks wait for at its end is
        captured too.
        """
        versions, books = self._engine.buffers.versions(), self._engine.gradients.used
        before = bytes(books)
        books[:] = bytes(len(books))
        yield
        self._engine.passes.complete()
        self._engine.reducer.finish()  # nothing is on its way when the graph ends
        self._end_capture(1, versions)
        self._used = [number for number, used in enumerate(books) if used]
        books[:] = bytes(a | b for a, b in zip(books, before, strict=True))

    def end_backward(self) -> None:
        """The graph was replayed."""
        self._note(1)

    def _join(self) -> None:
        for unit in self._engine.units:
            # hazard: work in a side stream that the graph does not wait for at its end
            unit.wait()

    def _end_capture(self, part: int, versions: list[tuple[Tensor, int]]) -> None:
        self._join()
        # What is in other memory for once stays in the graph's.
        self._filled[part] = [
            unit.index
            for unit in self._engine.units
            if unit.phase is Phase.UNSHARDED and unit.buffer is unit._home
        ]
        self._written[part] = [buffer for buffer, version in versions if buffer._version != version]

    def _fill(self, filled: list[int]) -> None:
        """Bring the units with these indices, and no others, into the slots; collective."""
        for unit in self._engine.units:
            if unit.index not in filled:
                unit.reshard()
        for index in filled:
            self._engine.units[index].unshard()
        self._join()

    def _note(self, part: int) -> None:
        for unit in self._engine.units:
            unit.replayed(unit.index in self._filled[part])
        increment_version(self._written[part])  # seen by those who keep buffers equal on all ranks


@contextmanager
def rehearsed_backward(engine: Zero3Engine) -> Iterator[None]:
    """Around a backward of what is differentiated again: buffers, which autograd may have saved,
    stay as they are on each rank.
    """
    passes = engine.passes
    in_step, passes.in_step = passes.in_step, True
    try:
        with engine.backward():
            yield
    finally:
        passes.in_step, passes._owed = in_step, b""
