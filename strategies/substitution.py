"""Optimizers that cannot step on flat shards step on other tensors, which exist for the time of a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .engine import Zero3Engine


class Substitution:
    """Puts other tensors into an optimizer's groups while it steps, except while a closure runs the model.

    Args:
        engine: it has sharded the optimizer's parameters.
        index: of the optimizer.
        optimizer: its groups hold flat tensors between steps.
    """

    early = False  # put them in before a closure has made gradients, too

    def __init__(self, engine: Zero3Engine, index: int, optimizer: Optimizer) -> None:
        self.engine, self.index, self.optimizer = engine, index, optimizer
        self._between: list[list[nn.Parameter]] = []  # what the groups hold otherwise
        self._nested = 0  # calls of `super().step()` within `step()`, which have hooks too
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(_refuse_state_dict),
        ]

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def load(self) -> list[list[nn.Parameter]]:
        """The tensors for each group, with the weights and gradients of now; collective."""
        raise NotImplementedError

    def store(self) -> None:
        """The optimizer changed the tensors: change the shards; collective."""
        raise NotImplementedError

    def loss(self, value: Any) -> Any:
        """What a closure returned, as the optimizer is to see it; collective."""
        return value

    def _before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._between or getattr(closure, "func", None) == self._evaluate:
            self._nested += 1
            return None
        self._nested = 0
        if closure is None or self.early:
            self._enter()
        return None if closure is None else (args[:1], {**kwargs, "closure": partial(self._evaluate, closure)})

    def _after_step(self, *_: Any) -> None:
        if self._nested:
            self._nested -= 1
        elif self._between:
            self._leave()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        if self._between:
            self._leave()
        value = self.loss(closure())
        self._enter()
        return value

    @torch.no_grad()
    def _enter(self) -> None:
        self.engine.adopt_gradients()
        for group, tensors in zip(self.optimizer.param_groups, self.load(), strict=True):
            self._between.append(group["params"][:])
            group["params"][:] = tensors

    @torch.no_grad()
    def _leave(self) -> None:
        for group, flats in zip(self.optimizer.param_groups, self._between, strict=True):
            group["params"][:] = flats
        self._between = []
        self.store()
        self.engine.weights_changed(self.engine.stepped_by(self.optimizer))


def _refuse_state_dict(optimizer: Optimizer) -> None:
    raise ValueError(
        f"`{type(optimizer).__name__}.state_dict()` would be of what this rank steps on alone, which is there in a step only. "
        "Save with `trainer.save_checkpoint(path)` and load with `trainer.fit(model, ckpt_path=path)`, on all ranks."
    )
