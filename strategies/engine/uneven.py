"""Evaluation steps that only some ranks run: the others take part in what is exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ..collectives import LocalCollectives
from .unit import Exchange, Unit


class JointSteps:
    """Ranks that run announce which units they unshard and read; ranks that assist listen.

    Gradients of parameters are dropped in such a step: they would be a mean over some ranks.
    """

    def __init__(self, units: list[Unit], collectives: LocalCollectives) -> None:
        self._units, self._collectives = units, collectives
        self._arena = units[0].arena
        self.running = False  # a step in which other ranks assist

    @contextmanager
    def run(self, step: AbstractContextManager[None]) -> Iterator[None]:
        """Around a step of this rank in which others :meth:`assist`."""
        self._release_all()
        self.running = True
        self._arena.announce = self._announce
        try:
            with step:
                yield
            self._tell(0)
        finally:
            self.running = False
            self._arena.announce = None
            self._release_all()

    def assist(self, steps: int) -> None:
        """Take part in what the other ranks exchange in ``steps`` steps that this rank does not
        run.
        """
        for _ in range(steps):
            self._release_all()
            while code := self._tell(0):
                index, exchange = divmod(code - 1, len(Exchange))
                unit = self._units[index]
                if exchange == Exchange.UNSHARD:
                    unit.reshard()
                    unit.unshard()
                    unit.wait()  # the rank that runs waits until this one has read
                else:
                    unit.values()
            self._release_all()

    def _announce(self, unit: Unit, exchange: Exchange) -> None:
        self._tell(1 + unit.labels[exchange])

    def _tell(self, code: int) -> int:
        with torch._C._DisableFuncTorch():  # a transform that runs would not let it be written to
            return int(
                self._collectives.agree(torch.tensor([code], dtype=torch.int64, device="cpu"))
            )

    def _release_all(self) -> None:
        # From here on ranks that run and ranks that assist have the same units in their buffers
        # (none), and the same trace.
        for unit in self._units:
            unit.reshard()
        self._collectives.exchange_log.suspend_trace()
