"""Run a micro-batch once more, eagerly and from the same random states, to look into it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor

from ..engine import Zero3Engine
from ..support import random_states


class SecondRun:
    """Repeats forward and backward of the last micro-batch, for automatic optimization.

    It logs nothing, and calls no hook of Lightning but ``training_step`` and ``backward``. Side
    effects of these two (printing, counting, updating metrics) happen twice.

    Args:
        trainer: the running Trainer.
        engine: the engine of its model.
        step: the strategy's ``training_step``, which is called within :meth:`Zero3Engine.step`.
    """

    def __init__(self, trainer: pl.Trainer, engine: Zero3Engine, step: Callable[..., Any]) -> None:
        self._trainer, self._engine, self._step = trainer, engine, step

    def begin(self) -> None:
        """Keep the random states with which a micro-batch begins.

        Lightning keeps the batch in `_ResultCollection.batch` until the micro-batch has ended.
        """
        self._start = random_states.capture()

    def __call__(self) -> Tensor:
        """Run the micro-batch and its backward again, and restore the random states; collective.

        Gradients add to those that are there.

        Returns:
            The loss [], before it is scaled.

        Raises:
            RuntimeError: ``training_step`` returned no loss.
        """
        trainer = self._trainer
        module, plugin = trainer.lightning_module, trainer.precision_plugin
        loop = trainer.fit_loop.epoch_loop
        arguments = loop._build_kwargs(OrderedDict(), loop._results.batch, loop.batch_idx)
        now = random_states.capture()
        random_states.restore(self._start)
        try:
            with _without_logging(module):
                with self._engine.step():
                    output = self._step(*arguments.values())
                loss = ClosureResult.from_training_step_output(
                    output, trainer.accumulate_grad_batches
                ).closure_loss
                if loss is None:
                    raise RuntimeError("`training_step` returned no loss")
                # `plugin.backward` of the class: a callback may have replaced the instance's.
                with self._engine.backward():
                    type(plugin).backward(plugin, loss, module, trainer.optimizers[0])
            return loss.detach()
        finally:
            random_states.restore(now)


@contextmanager
def _without_logging(module: pl.LightningModule) -> Iterator[None]:
    own = module.__dict__.get("log")
    module.log = _log_nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log
        if own is not None:
            module.log = own  # type: ignore[method-assign]


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass
