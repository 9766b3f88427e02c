"""Let an optimizer that cannot step on flat shards step on other tensors.

These tensors exist for the time of a step.
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
    """Puts other tensors into an optimizer's groups while it steps.

    While a closure runs the model, the groups hold the flat tensors.

    Args:
        engine: the engine that has sharded the optimizer's parameters.
        index: number of the optimizer.
        optimizer: its groups hold flat tensors between steps.
    """

    # Whether the optimizer needs the other tensors before its closure has made gradients, too.
    needs_early_tensors = False

    def __init__(self, engine: Zero3Engine, index: int, optimizer: Optimizer) -> None:
        self.engine, self.index, self.optimizer = engine, index, optimizer
        # Flat tensors of each group while other tensors are in their places, else empty.
        self._replaced: list[list[nn.Parameter]] = []
        self._nested_steps = 0  # calls of `super().step()` within `step()`, which have hooks too
        self._handles = [
            *engine.hook_step(optimizer, self._before_step, self._after_step),
            optimizer.register_state_dict_pre_hook(_refuse_state_dict),
        ]
        # A learning-rate scheduler of torch sets `step` on the optimizer itself.
        own = {"step": optimizer.step} if "step" in vars(optimizer) else {}
        self._own_step: dict[str, Any] = own
        self._wrap_step(optimizer.step)

    def close(self) -> None:
        """Remove the hooks, and the wrapper of `step` unless somebody has wrapped it since."""
        for handle in self._handles:
            handle.remove()
        if vars(self.optimizer).get("step") is self._wrapped_step:
            del self.optimizer.step
            vars(self.optimizer).update(self._own_step)

    def load_tensors(self) -> list[list[nn.Parameter]]:
        """Return the tensors for each group, with current weights and gradients; collective."""
        raise NotImplementedError

    def store_tensors(self) -> None:
        """Write what the optimizer made of the tensors to the shards; collective."""
        raise NotImplementedError

    def convert_loss(self, value: Any) -> Any:
        """Return what the optimizer gets for the ``value`` of its closure; collective."""
        return value

    def _before_step(
        self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._replaced or getattr(closure, "func", None) == self._evaluate_closure:
            self._nested_steps += 1
            return None
        self._nested_steps = 0
        if closure is None or self.needs_early_tensors:
            self._insert_tensors()
        if closure is None:
            return None
        return args[:1], {**kwargs, "closure": partial(self._evaluate_closure, closure)}

    def _after_step(self, *_: Any) -> None:
        if self._nested_steps:
            self._nested_steps -= 1
        elif self._replaced:
            self._restore_flats()

    def _wrap_step(self, step: Any) -> None:
        """Wrap ``step`` so that the groups hold their flat tensors again after a step that raises.

        torch calls no post hook (`Optimizer.profile_hook_step`) after a step that raises.
        """

        @wraps(getattr(step, "__func__", step))
        def step_or_restore(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            except BaseException as error:
                if self._replaced:
                    self._end_failed_step(error)
                raise

        self._wrapped_step = MethodType(step_or_restore, self.optimizer)
        self.optimizer.step = self._wrapped_step  # type: ignore[method-assign]

    def _end_failed_step(self, error: BaseException) -> None:
        """Restore the groups after a step that raised ``error``.

        The weights become what the failed step would leave in one process, unless the run is
        interrupted: then they stay as they were before the step.

        Raises:
            ValueError: in place of an error that an empty param group explains.
        """
        empty = [
            str(number)
            for number, group in enumerate(self.optimizer.param_groups)
            if not group["params"]
        ]
        self._nested_steps = 0
        # hazard: to store is collective, and other ranks may not come to it after an interrupt of
        # this one, which is no `Exception`.
        self._restore_flats(isinstance(error, Exception))
        self.engine.guard(self.optimizer, True)
        if empty and isinstance(error, IndexError | StopIteration):
            name = type(self.optimizer).__name__
            raise ValueError(
                f"{name} steps on whole parameters, each on the rank that owns it, and here a param"
                f" group may be empty (now {', '.join(empty)}), which {name} does not expect:"
                f" {type(error).__name__}: {error}. Look at `group['params']` in loops alone, not"
                " at its first element, or put its parameters into another group."
            ) from error

    def _evaluate_closure(self, closure: Callable[[], Any]) -> Any:
        if self._replaced:
            self._restore_flats()
        value = self.convert_loss(closure())
        self._insert_tensors()
        return value

    @torch.no_grad()
    def _insert_tensors(self) -> None:
        self.engine.adopt_gradients()
        for group, tensors in zip(self.optimizer.param_groups, self.load_tensors(), strict=True):
            self._replaced.append(group["params"][:])
            group["params"][:] = tensors

    @torch.no_grad()
    def _restore_flats(self, has_changed: bool = True) -> None:
        for group, flats in zip(self.optimizer.param_groups, self._replaced, strict=True):
            group["params"][:] = flats
        self._replaced = []
        if has_changed:
            self.store_tensors()
            self.engine.weights_changed(self.engine.stepped_by(self.optimizer))


def _refuse_state_dict(optimizer: Optimizer) -> None:
    raise ValueError(
        f"`{type(optimizer).__name__}.state_dict()` would be of what this rank steps on alone,"
        " which is there in a step only. Save with `trainer.save_checkpoint(path)` and load with"
        " `trainer.fit(model, ckpt_path=path)`, on all ranks."
    )
