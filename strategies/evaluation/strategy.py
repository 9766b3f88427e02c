"""The part of the strategy that evaluates a sharded model on unequal numbers of batches.

Ranks with fewer batches take part in the exchanges of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops import _EvaluationLoop, _PredictionLoop
from typing_extensions import override

from ..collectives import DivergenceError, Meeting
from ..data import NoBatch, ShardedLoader, compare_streams
from ..engine import Zero3Engine, compare_notes
from ..liveness.position import Activity
from ..liveness.strategy import WatchedStrategy
from .logged_values import collect_logged, log_without_weight
from .uneven_plan import Turn, plan_turns
from .uneven_steps import assist, uneven_step


class EvaluationStrategy(WatchedStrategy):
    """Runs validation, test and prediction steps of a model that ``engine`` has sharded."""

    engine: Zero3Engine | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engine = None
        # Turns of each loader; None where the ranks agree in each step on which have a batch.
        self._turns: list[Iterator[Turn] | None] = []

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @override
    def on_validation_start(self) -> None:
        self.write_activity(Activity.BETWEEN_VALIDATION)
        self._plan_turns(self._trainer._evaluation_loop)

    @override
    def on_test_start(self) -> None:
        self.write_activity(Activity.BETWEEN_TEST)
        self._plan_turns(self._trainer._evaluation_loop)

    @override
    def on_predict_start(self) -> None:
        self.write_activity(Activity.BETWEEN_PREDICT)
        self._plan_turns(self._trainer.predict_loop)

    @override
    def on_validation_end(self) -> None:
        self._end_turns(self._trainer._evaluation_loop)

    @override
    def on_test_end(self) -> None:
        self._end_turns(self._trainer._evaluation_loop)

    @override
    def on_predict_end(self) -> None:
        self._end_turns(self._trainer.predict_loop)
        for predictions in self._trainer.predict_loop._predictions:
            predictions[:] = [p for p in predictions if not isinstance(p, NoBatch)]

    def _plan_turns(self, loop: _EvaluationLoop | _PredictionLoop) -> None:
        """Agree on how many batches each rank has, so that no rank waits for one that has none.

        This is collective.

        Raises:
            ValueError: a rank has no sample of a loader that runs beside others.
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
            combine = {"min_size": min, "max_size": max, "max_size_cycle": max}[mode]
            counts = [combine(counts)]
        self._turns = []
        collectives = self.engine.collectives
        compare_notes(collectives)
        everyone = collectives.all_gather_object(counts)
        for loader, batches in zip(loaders, zip(*everyone, strict=True), strict=False):
            if isinstance(loader, ShardedLoader) and loader.may_lack_batches:
                self._turns.append(None)
            elif all(float(n).is_integer() for n in batches):
                self._turns.append(iter(plan_turns(batches, self.global_rank)))
            else:
                # A loader of the user, of unknown length, must have as many batches on each rank.
                self._turns.append(iter(()))

    def _end_turns(self, loop: _EvaluationLoop | _PredictionLoop) -> None:
        """Compare at the end of an evaluation what all ranks did; collective."""
        assert self.engine is not None
        # hazard: a loader that ends sooner than its length says, or that has no length, would leave
        # the others waiting for this rank.
        self.engine.collectives.meet(Meeting.EVALUATED)
        # Else the next backward compares, but there may be none.
        compare_notes(self.engine.collectives)
        compare_streams(loop._combined_loader, self.engine.collectives.all_gather_object)
        self.write_activity()

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one step, or assist the ranks that do; a rank without a batch returns its `NoBatch`.

        Raises:
            DivergenceError: ranks exchange different things in the step.
        """
        assert self.engine is not None
        lacks_batch = isinstance(args[0], NoBatch)
        # Lightning's evaluation loops pass the loader's index last, if there are several loaders.
        has_index = len(self._turns) > 1 and len(args) > 1
        turn = self._next_turn(args[-1] if has_index else 0, lacks_batch)
        output = args[0]
        try:
            if not lacks_batch:
                context = self.engine.step()
                with uneven_step(self.engine, context) if turn.is_uneven else context:
                    if not turn.is_uneven:
                        # All ranks run this step: their traces can be compared from here on.
                        self.engine.collectives.exchange_log.resume_trace()
                    output = step(*args, **kwargs)
                if not turn.is_uneven:
                    # hazard: a forward that one rank runs alone would take part in the others' next
                    # batch, and no backward comes that would find it.
                    assert self._signals is not None
                    self._signals.between_batches()
            assist(self.engine, turn.assisted_steps)
        except DivergenceError as error:
            if not turn.is_uneven and not turn.assisted_steps:
                raise
            raise DivergenceError(
                f"{error}\nNot every rank has a batch in this evaluation step. Log with"
                " on_step=False in it, and leave what all ranks do together (all_gather, barrier)"
                " to the end of the epoch."
            ) from error
        results = self._trainer._results
        if turn.has_empty_rank and results is not None:
            self._share_logged_values(results, lacks_batch)
        return output

    def _next_turn(self, loader: int, lacks_batch: bool) -> Turn:
        assert self.engine is not None
        turns = self._turns[loader]
        if turns is not None:
            return next(turns, Turn())
        is_uneven = bool(
            self.engine.collectives.agree(torch.tensor([int(lacks_batch)], device="cpu"))
        )
        return Turn(is_uneven, int(lacks_batch), has_empty_rank=is_uneven)

    def _share_logged_values(self, results: Any, lacks_batch: bool) -> None:
        """Let a rank that ran no step log the values of the others with no weight; collective."""
        # hazard: Lightning sums logged values over all ranks when the loader ends; the others would
        # wait for a rank that has logged nothing.
        assert self.engine is not None
        everyone = self.engine.collectives.all_gather_object(
            None if lacks_batch else collect_logged(results)
        )
        if lacks_batch:
            log_without_weight(next(one for one in everyone if one is not None), results, self)

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
        counts = loader.batches_per_rank if isinstance(loader, ShardedLoader) else None
        if counts is not None and 0 in counts:
            raise ValueError(
                f"{loader.label}: rank {counts.index(0)} has no sample of it, so"
                f" CombinedLoader(mode={mode!r}) cannot give it a batch.\nUse fewer ranks, or"
                " hand the loaders over as a list, which runs them one after another."
            )
