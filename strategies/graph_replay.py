"""What the engine notes in Python during a step, for steps that run as captured graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import increment_version

from .engine import Phase, Unit, Zero3Engine


class ReplayedStep:
    """The books of one captured forward and backward: parts 0 and 1.

    A graph repeats what the device did in the capture, unshards and reductions included. That is
    right only if the buffers hold what they held then, nothing is on its way, and the gradients are
    to be added to; and afterwards the engine must know what they hold now. So each capture and
    each replay stands inside of :meth:`replaying`.
    """

    def __init__(self, engine: Zero3Engine) -> None:
        self._engine = engine
        engine.gradients.lasting = True
        engine.pool.is_captured = True
        self._filled: list[Unit] = []  # in buffers after the forward; the backward leaves none
        self._used: list[int] = []  # numbers of the parameters that get a gradient
        self._written: list[list[Tensor]] = [[], []]  # buffers that each part writes to

    @contextmanager
    def replaying(self, part: int) -> Iterator[None]:
        """Around the replay, or capture, of the forward, or of the backward inside of
        ``engine.backward()``, which goes on to end the pass.

        The forward begins with empty buffers: units that an earlier micro-batch has left there are
        unsharded again.
        """
        units, gradients = self._engine.units, self._engine.gradients
        if part:
            self._engine.passes.begin(silent=True)
        else:
            self._engine.open_step()
        # A hook of the user's may have run units since the forward.
        filled = self._filled if part else []
        for unit in units:
            if unit in filled:
                unit.unshard()
            else:
                unit.reshard()
        self._join()
        if part:
            for chunk in gradients.chunks:
                chunk.gradients_or_zeros()  # the graph adds to them
            for number in self._used:
                gradients.used[number] = 1
        yield
        for unit in units:
            if part or unit not in self._filled:
                unit.reshard()
            elif unit.phase is Phase.SHARDED:
                unit.phase = Phase.UNSHARDED
                unit.pool.holders.append(unit)
        self._engine.passes.replayed = bool(part)
        # so that what keeps the module's buffers equal on all ranks sees it
        increment_version(self._written[part])

    @contextmanager
    def capturing(self, part: int) -> Iterator[None]:
        """Inside of the graph. What the other ranks wait for at the end of a backward is captured,
        too.
        """
        engine, books = self._engine, self._engine.gradients.used
        before = bytes(books)
        versions = [
            (b, b._version) for b in engine.structure.model.buffers() if not b.is_inference()
        ]
        if part:
            books[:] = bytes(len(books))
        yield
        if part:
            engine.passes.complete()
            engine.reducer.finish()  # nothing is on its way when the graph ends
            self._used = [number for number, used in enumerate(books) if used]
            books[:] = bytes(a | b for a, b in zip(books, before, strict=True))
        self._join()
        if not part:
            # What is in other memory for once stays in the graph's.
            self._filled = [
                unit
                for unit in engine.units
                if unit.phase is Phase.UNSHARDED and not unit.pins and unit.buffer is unit.home
            ]
        self._written[part] = [buffer for buffer, version in versions if buffer._version != version]

    def _join(self) -> None:
        for unit in self._engine.units:
            # hazard: work in a side stream that the graph does not wait for at its end
            unit.wait()


@contextmanager
def rehearsed_backward(engine: Zero3Engine) -> Iterator[None]:
    """Around a backward, in a step, of what is differentiated again: buffers, which autograd may
    have saved, stay as they are on each rank.
    """
    with engine.backward():
        yield
    engine.passes.stale_buffers = b""
