"""Evaluation steps that only some ranks run: the others take part in what is gathered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from .collectives import LocalCollectives
from .unit import Exchange, Unit


class JointSteps:
    """Ranks that run announce what they gather; ranks that assist listen."""

    def __init__(self, units: list[Unit], collectives: LocalCollectives) -> None:
        self._units, self._collectives = units, collectives

    @contextmanager
    def run(self, step: AbstractContextManager[None]) -> Iterator[None]:
        """Around a step of this rank in which others :meth:`assist`."""
        self._release_all()
        for unit in self._units:
            unit.announce = self._announce
        try:
            with step:
                yield
            self._tell(0)
        finally:
            for unit in self._units:
                unit.announce = None
            self._release_all()

    def assist(self, steps: int) -> None:
        """Take part in what the other ranks gather in ``steps`` steps that this rank does not run."""
        for _ in range(steps):
            self._release_all()
            while code := self._tell(0):
                index, exchange = divmod(code - 1, len(Exchange))
                unit = self._units[index]
                if exchange == Exchange.SLOT:
                    unit.release()
                    unit.gather()
                elif exchange == Exchange.COPY:
                    unit.copy_of_slot()
                else:
                    unit.values()
            self._release_all()

    def _announce(self, unit: Unit, exchange: Exchange) -> None:
        self._tell(1 + unit.labels[exchange])

    def _tell(self, code: int) -> int:
        return int(self._collectives.agree(torch.tensor([code], dtype=torch.int64)))

    def _release_all(self) -> None:
        # From here on ranks that run and ranks that assist have the same units in their slots (none), and the same trace.
        for unit in self._units:
            unit.release()
        self._collectives.trace.clear()
