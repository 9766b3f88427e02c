"""The evaluation loops of a sharded model: ranks with fewer batches take part in what the others exchange."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from .engine import Zero3Engine
from .turns import Turn, plan_turns
from .watched import WatchedStrategy


class EvaluationStrategy(WatchedStrategy):
    """Runs validation, test and prediction steps of a model that ``engine`` has sharded."""

    engine: Zero3Engine | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine = None
        self._turns: Iterator[Turn] = iter(())

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @override
    def on_validation_start(self) -> None:
        self._plan_turns(self._trainer._evaluation_loop.max_batches)

    @override
    def on_test_start(self) -> None:
        self.on_validation_start()

    @override
    def on_predict_start(self) -> None:
        self._plan_turns(self._trainer.predict_loop.max_batches)

    def _plan_turns(self, batches: Sequence[int | float]) -> None:
        """Agree on who has how many batches, so that nobody waits for a rank that has none left; collective."""
        assert self.engine is not None
        self.engine.structure.check()
        self.engine.buffers.synchronize()
        everyone = self.engine.collectives.all_gather_object(list(batches))
        self._turns = iter(())
        if all(float(n).is_integer() for counts in everyone for n in counts):  # infinite: a stream without a length
            before, turns = plan_turns(everyone, self.global_rank)
            self._turns = iter(turns)
            self.engine.joint.assist(before)

    @contextmanager
    def _evaluation_turn(self) -> Generator[None, None, None]:
        assert self.engine is not None
        turn = next(self._turns, Turn(joint=False, assist=0))
        step = self.engine.step()
        with self.engine.joint.run(step) if turn.joint else step:
            yield
        self.engine.joint.assist(turn.assist)
        if self._signals is not None and not turn.joint:
            self._signals.between_batches()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_turn():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_turn():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation_turn():
            return super().predict_step(*args, **kwargs)
