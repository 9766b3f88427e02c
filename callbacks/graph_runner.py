"""Decides for each micro-batch whether it runs eagerly, is captured or replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from .graph_batch import signature
from .graph_device import CudaGraphs, SoftwareGraphs
from .graph_step import CapturedStep, StaticGradients


@dataclass
class _Shape:
    """What is known of batches of one signature."""

    watched: int = 0  # eager steps so far
    step: CapturedStep | None = None


class StepRunner:
    """Stands in for the strategy's ``training_step`` and its precision plugin's ``backward`` during a fit.

    Args:
        trainer: that trains.
        module: that is trained.
        graphs: makes them.
        warmup: eager steps with batches of one signature before its capture.
        max_graphs: signatures that are captured; others run eagerly.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, graphs: CudaGraphs | SoftwareGraphs, warmup: int, max_graphs: int
    ) -> None:
        self._trainer, self._module, self._graphs = trainer, module, graphs
        self._warmup, self._max_graphs = warmup, max_graphs
        self._gradients = StaticGradients()
        self._shapes: dict[Hashable, _Shape] = {}
        self._current: CapturedStep | None = None
        self._watched: _Shape | None = None
        self.replays = 0
        self._eager_step = trainer.strategy.training_step
        self._plugin = trainer.strategy.precision_plugin
        self._eager_backward = self._plugin.backward

    def install(self) -> None:
        """From now on steps go through this object."""
        self._graphs.enter()
        self._trainer.strategy.training_step = self._training_step
        self._plugin.backward = self._backward

    def remove(self) -> None:
        """The graphs go, and everything is as it was."""
        self._trainer.strategy.__dict__.pop("training_step", None)
        self._plugin.__dict__.pop("backward", None)
        self.drop()
        self._graphs.leave()

    def drop(self) -> None:
        """Free all graphs; what runs next runs eagerly and is captured anew."""
        for shape in self._shapes.values():
            if shape.step is not None:
                shape.step.reset()
        self._shapes = {}
        self._current = None
        self._graphs.renew()

    @property
    def captured(self) -> int:
        """Number of signatures that have graphs."""
        return sum(shape.step is not None for shape in self._shapes.values())

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._current = self._watched = None
        batch, *rest = args
        shape = self._shapes.setdefault(self._key(batch), _Shape())
        if shape.step is None and shape.watched < self._warmup:
            self._watched = shape
            shape.watched += 1
            return self._eager_step(*args, **kwargs)
        if shape.step is None:
            if self.captured >= self._max_graphs:
                return self._eager_step(*args, **kwargs)
            step = CapturedStep(self._graphs.make, self._gradients, self._without)
            step.capture_forward(batch, tuple(rest), self._eager_step, self._module)
            shape.step = step
        else:
            shape.step.fill(batch)
        self._current = shape.step
        self.replays += 1
        return shape.step.replay_forward(self._module)

    def _key(self, batch: Any) -> Hashable:
        # DDP reduces only in the last micro-batch of a step.
        return signature(batch), getattr(self._trainer.strategy.model, "require_backward_grad_sync", None)

    def _backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        run: Callable[[], None] = lambda: self._eager_backward(tensor, *args, **kwargs)  # noqa: E731
        step, self._current = self._current, None
        if step is not None:
            step.replay_backward(run)
        else:
            run()
            if self._watched is not None:
                self._without = {p for p in self._module.parameters() if p.requires_grad and p.grad is None}
