"""Optimizers that cannot step on flat shards step on other tensors, which exist for the time of a
step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..engine import Zero3Engine


class Substitution:
    """Puts other tensors into an optimizer's groups while it steps, except while a closure runs the
    model.

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
            *engine.hook_step(optimizer, self._before_step, self._after_step),
            optimizer.register_state_dict_pre_hook(_refuse_state_dict),
        ]
        # a scheduler's
        self._own: dict[str, Any] = {"step": optimizer.step} if "step" in vars(optimizer) else {}
        self._watch(optimizer.step)

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        if vars(self.optimizer).get("step") is self._watched:  # else somebody has wrapped it since
            del self.optimizer.step
            vars(self.optimizer).update(self._own)

    def load(self) -> list[list[nn.Parameter]]:
        """The tensors for each group, with the weights and gradients of now; collective."""
        raise NotImplementedError

    def store(self) -> None:
        """The optimizer changed the tensors: change the shards; collective."""
        raise NotImplementedError

    def loss(self, value: Any) -> Any:
        """What a closure returned, as the optimizer is to see it; collective."""
        return value

    def _before_step(
        self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._between or getattr(closure, "func", None) == self._evaluate:
            self._nested += 1
            return None
        self._nested = 0
        if closure is None or self.early:
            self._enter()
        return (
            None
            if closure is None
            else (args[:1], {**kwargs, "closure": partial(self._evaluate, closure)})
        )

    def _after_step(self, *_: Any) -> None:
        if self._nested:
            self._nested -= 1
        elif self._between:
            self._leave()

    def _watch(self, step: Any) -> None:
        """Of a step that raises no hook of torch's is told, and its tensors must not stay in the
        groups.
        """

        @wraps(getattr(step, "__func__", step))
        def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except BaseException as error:
                if self._between:
                    self._give_up(error)
                raise

        self._watched = self.optimizer.step = MethodType(watched, self.optimizer)

    def _give_up(self, error: BaseException) -> None:
        """The groups are as before ``error``; the weights as one process would leave them, unless
        the run is interrupted.
        """
        lacking = [
            str(number)
            for number, group in enumerate(self.optimizer.param_groups)
            if not group["params"]
        ]
        self._nested = 0
        self._leave(isinstance(error, Exception))
        self.engine.guard(self.optimizer, True)
        if lacking and isinstance(error, IndexError | StopIteration):
            name = type(self.optimizer).__name__
            raise ValueError(
                f"{name} steps on whole parameters, each on the rank that owns it, and here a param"
                f" group may be empty (now {', '.join(lacking)}), which {name} does not expect:"
                f" {type(error).__name__}: {error}. Look at `group['params']` in loops alone, not"
                " at its first element, or put its parameters into another group."
            ) from error

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
    def _leave(self, changed: bool = True) -> None:
        for group, flats in zip(self.optimizer.param_groups, self._between, strict=True):
            group["params"][:] = flats
        self._between = []
        if not changed:
            return
        self.store()
        self.engine.weights_changed(self.engine.stepped_by(self.optimizer))


def _refuse_state_dict(optimizer: Optimizer) -> None:
    raise ValueError(
        f"`{type(optimizer).__name__}.state_dict()` would be of what this rank steps on alone,"
        " which is there in a step only. Save with `trainer.save_checkpoint(path)` and load with"
        " `trainer.fit(model, ckpt_path=path)`, on all ranks."
    )
