"""The evaluation loops of a sharded model: ranks with fewer batches take part in what the others
exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops import _EvaluationLoop, _PredictionLoop
from typing_extensions import override

from ..collectives import DivergenceError, Meeting
from ..data import NoBatch, ShardedLoader
from ..engine import Zero3Engine, compare_notes
from ..liveness.strategy import WatchedStrategy
from .logged_values import adopt, describe
from .uneven_plan import Turn, plan_turns


class EvaluationStrategy(WatchedStrategy):
    """Runs validation, test and prediction steps of a model that ``engine`` has sharded."""

    engine: Zero3Engine | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine = None
        self._turns: list[
            Iterator[Turn] | None
        ] = []  # of each loader; None: who has a batch is agreed on in each step

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @override
    def on_validation_start(self) -> None:
        self._plan_turns(self._trainer._evaluation_loop)

    @override
    def on_test_start(self) -> None:
        self.on_validation_start()

    @override
    def on_predict_start(self) -> None:
        self._plan_turns(self._trainer.predict_loop)

    @override
    def on_validation_end(self) -> None:
        self._end_turns()

    @override
    def on_test_end(self) -> None:
        self._end_turns()

    @override
    def on_predict_end(self) -> None:
        self._end_turns()
        for predictions in self._trainer.predict_loop._predictions:
            predictions[:] = [
                prediction for prediction in predictions if not isinstance(prediction, NoBatch)
            ]

    def _plan_turns(self, loop: _EvaluationLoop | _PredictionLoop) -> None:
        """Agree on who has how many batches, so that nobody waits for a rank that has none left;
        collective.
        """
        assert self.engine is not None and loop._combined_loader is not None
        self.engine.structure.check()
        self.engine.buffers.synchronize()
        loaders, mode = loop._combined_loader.flattened, loop._combined_loader._mode
        counts = [
            0 if _is_empty(loader) else n
            for loader, n in zip(loaders, loop.max_batches, strict=True)
        ]
        if mode != "sequential":
            _require_samples_everywhere(loaders, mode)
            counts = [{"min_size": min, "max_size": max, "max_size_cycle": max}[mode](counts)]
        self._turns = []
        collectives = self.engine.collectives
        compare_notes(collectives)
        everyone = collectives.all_gather_object(counts)
        for loader, batches in zip(loaders, zip(*everyone, strict=True), strict=False):
            if isinstance(loader, ShardedLoader) and loader.may_lack_batches:
                self._turns.append(None)
            elif all(float(n).is_integer() for n in batches):
                self._turns.append(iter(plan_turns(batches, self.global_rank)))
            else:  # the user's own, of unknown length: as many steps on each rank
                self._turns.append(iter(()))

    def _end_turns(self) -> None:
        """A rank whose loader has ended sooner than it said, or had not said when, must not leave
        the others waiting.
        """
        assert self.engine is not None
        self.engine.collectives.meet(Meeting.EVALUATED)
        compare_notes(self.engine.collectives)  # no backward may come

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one step, or help those that do; what a rank without a batch returns is its
        `NoBatch`.
        """
        assert self.engine is not None
        lacks_batch = isinstance(args[0], NoBatch)
        # then the last argument is the loader's index
        several = len(self._turns) > 1 and len(args) > 1
        turn = self._next_turn(args[-1] if several else 0, lacks_batch)
        output = args[0]
        try:
            if not lacks_batch:
                context = self.engine.step()
                with self.engine.joint.run(context) if turn.joint else context:
                    if not turn.joint:
                        # all ranks run this step, from here to the next one
                        self.engine.collectives.exchange_log.resume()
                    output = step(*args, **kwargs)
                if not turn.joint:  # all ranks run this step
                    # Forwards of one rank alone would take part in the others' next batch, and no
                    # backward tells.
                    self.engine.collectives.meet(Meeting.BATCH)
                    if self._signals is not None:
                        self._signals.between_batches()
            self.engine.joint.assist(turn.assist)
        except DivergenceError as error:
            if not turn.joint and not turn.assist:
                raise
            raise DivergenceError(
                f"{error} HINT: not every rank has a batch in this evaluation step. Log with"
                " on_step=False in it, and leave what all ranks do together (all_gather, barrier)"
                " to the end of the epoch."
            ) from error
        if turn.lacking and self._trainer._results is not None:
            self._share_logged_values(lacks_batch)
        return output

    def _next_turn(self, loader: int, lacks_batch: bool) -> Turn:
        assert self.engine is not None
        turns = self._turns[loader]
        if turns is not None:
            return next(turns, Turn())
        lacking = bool(
            self.engine.collectives.agree(torch.tensor([int(lacks_batch)], device="cpu"))
        )
        return Turn(joint=lacking, assist=int(lacks_batch), lacking=lacking)

    def _share_logged_values(self, lacks_batch: bool) -> None:
        """A rank that ran no step logs, with no weight, what the others log: they will wait for it
        to sum with them.
        """
        assert self.engine is not None
        results = self._trainer._results
        everyone = self.engine.collectives.all_gather_object(
            None if lacks_batch else describe(results)
        )
        if lacks_batch:
            adopt(next(found for found in everyone if found is not None), results, self)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, *args, **kwargs)


def _is_empty(loader: object) -> bool:
    return isinstance(loader, ShardedLoader) and loader.is_empty


def _require_samples_everywhere(loaders: list[Any], mode: str) -> None:
    for loader in loaders:
        if isinstance(loader, ShardedLoader) and 0 in (counts := loader.batches_per_rank or ()):
            raise ValueError(
                f"{loader.label}: rank {counts.index(0)} has no sample of it, so"
                f" CombinedLoader(mode={mode!r}) cannot give it a batch. HINT: use fewer ranks, or"
                " hand the loaders over as a list, which runs them one after another."
            )
