"""A micro-batch once more, eagerly and from the same random states, to look at what happens in
it.
"""

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
    """Repeats the forward and backward of the micro-batch that began last, with automatic
    optimization.

    It logs nothing, and calls no hook of Lightning but ``training_step`` and ``backward``. What
    these do besides (printing, counting, updating metrics) they do twice.

    Args:
        trainer: that trains.
        engine: of its model.
        step: the strategy's ``training_step``, inside of the engine's.
    """

    def __init__(self, trainer: pl.Trainer, engine: Zero3Engine, step: Callable[..., Any]) -> None:
        self._trainer, self._engine, self._step = trainer, engine, step

    def begin(self) -> None:
        """A micro-batch begins; Lightning keeps it until it has ended."""
        self._restore = random_states.mark(device=True)

    def __call__(self, backward: bool) -> Tensor:
        """Run it again; collective. Random states are afterwards what they were before.

        Args:
            backward: run its backward, too; gradients add to those that are there.

        Returns:
            The loss [], before it is scaled.
        """
        trainer = self._trainer
        module, plugin = trainer.lightning_module, trainer.precision_plugin
        loop = trainer.fit_loop.epoch_loop
        arguments = loop._build_kwargs(OrderedDict(), loop._results.batch, loop.batch_idx)
        put_back = random_states.mark(device=True)
        self._restore()
        try:
            with _logging_nothing(module):
                with self._engine.step():
                    output = self._step(*arguments.values())
                loss = ClosureResult.from_training_step_output(
                    output, trainer.accumulate_grad_batches
                ).closure_loss
                if loss is None:
                    raise RuntimeError("`training_step` returned no loss")
                if backward:
                    # not `plugin.backward`, in whose place a callback may stand
                    with self._engine.backward():
                        type(plugin).backward(plugin, loss, module, trainer.optimizers[0])
            return loss.detach()
        finally:
            put_back()


@contextmanager
def _logging_nothing(module: pl.LightningModule) -> Iterator[None]:
    own = module.__dict__.get("log")
    module.log = _nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log
        if own is not None:
            module.log = own  # type: ignore[method-assign]


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
