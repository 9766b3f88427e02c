"""Evaluation steps that only some ranks run: the others take part in what is exchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from ..collectives import LocalCollectives
from .gradients import Gradients
from .unit import Exchange, Unit


class JointSteps:
    """Ranks that run announce what they unshard, read and reduce; ranks that assist listen."""

    assist_backward: Callable[[Unit | None], None]  # see `Backward.assist`, which comes later

    def __init__(
        self, units: list[Unit], gradients: Gradients, collectives: LocalCollectives
    ) -> None:
        self._units, self._gradients, self._collectives = units, gradients, collectives
        # what is told; smaller numbers are the units' labels
        self._end_of_backward = 1 + len(units) * len(Exchange)
        self._start_of_backward = self._end_of_backward + 1
        self.running = False  # a step in which other ranks assist

    @contextmanager
    def run(self, step: AbstractContextManager[None]) -> Iterator[None]:
        """Around a step of this rank in which others :meth:`assist`."""
        self._release_all()
        self._announce_all(True)
        try:
            with step:
                yield
            self._tell(0)
            self._clear_alike(assists=False)
        finally:
            self._announce_all(False)
            self._release_all()

    def begin_backward(self) -> None:
        """It adds to what gradients there are, on ranks that assist, too."""
        if self.running:
            self._tell(self._start_of_backward)
            self._clear_alike(assists=False)

    @contextmanager
    def end_of_backward(self) -> Iterator[None]:
        """Around what all ranks do alike at the end of a backward, those that assist included."""
        running = self.running
        if running:
            self._tell(self._end_of_backward)
            self._announce_all(False)
        yield
        if running:
            self._announce_all(True)

    def _announce_all(self, running: bool) -> None:
        self.running = running
        for unit in self._units:
            unit.announce = self._announce if running else None

    def assist(self, steps: int) -> None:
        """Take part in what the other ranks exchange in ``steps`` steps that this rank does not
        run.
        """
        for _ in range(steps):
            self._release_all()
            while code := self._tell(0):
                if code == self._start_of_backward:
                    self._clear_alike(assists=True)
                    continue
                index, exchange = divmod(code - 1, len(Exchange))
                unit = None if code == self._end_of_backward else self._units[index]
                if unit is None or exchange == Exchange.REDUCE:
                    self.assist_backward(unit)
                elif exchange == Exchange.UNSHARD:
                    unit.reshard()
                    unit.unshard()
                    unit.wait()  # the rank that runs waits until this one has read
                elif exchange == Exchange.VALUES:
                    unit.values()
                else:
                    unit.gradients()
            self._clear_alike(assists=True)
            self._release_all()

    def _clear_alike(self, assists: bool) -> None:
        """Gradients that the ranks which run a step have cleared go from those that assist, too;
        collective.
        """
        entries = self._gradients.trained
        if not entries:
            return
        kept = [not assists and self._gradients.has_gradient(entry) for entry in entries]
        agreed = self._collectives.agree(torch.tensor(kept, dtype=torch.int64, device="cpu"))
        for entry, keep in zip(entries, agreed.tolist(), strict=True):
            if assists and not keep and self._gradients.has_gradient(entry):
                self._gradients.clear(entry)
        self._gradients.forget()  # what was gathered: not all ranks have cleared in the same way

    def _announce(self, unit: Unit, exchange: Exchange) -> None:
        self._tell(1 + unit.labels[exchange])

    def _tell(self, code: int) -> int:
        with torch._C._DisableFuncTorch():  # a transform that runs would not let it be written to
            return int(
                self._collectives.agree(torch.tensor([code], dtype=torch.int64, device="cpu"))
            )

    def _release_all(self) -> None:
        # From here on ranks that run and ranks that assist have the same units in their slots
        # (none), and the same trace.
        for unit in self._units:
            unit.reshard()
        self._collectives.exchange_log.suspend_trace()
