"""An optimizer's update as a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from .device import Graph

_CAPTURABLE = "Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, ASGD, RMSprop and Rprop"
# tensors that a loss scaler leaves for an optimizer that unscales gradients itself
_OF_SCALERS = (
    "grad_scale",
    "found_inf",
)
MAX_CHANGES = 5  # of what a graph depends on, without a replay in between


def check_optimizer(optimizer: Optimizer, device: torch.device) -> list[str]:
    """Why the step of ``optimizer``, whose parameters are on ``device``, cannot be captured."""
    name, found = type(optimizer).__name__, []
    for number, group in enumerate(optimizer.param_groups):
        option = "capturable" if "capturable" in group and device.type == "cuda" else "fused"
        if option not in group:
            found.append(
                f"{name} has no step that a graph can hold. {_CAPTURABLE} of torch.optim have with"
                " `capturable=True`; `CUDAGraphStep(optimizer=False)` leaves the optimizer eager."
            )
        elif not (group[option] or group.get("capturable")):
            found.append(
                f"{name} computes with Python numbers that change. Make it with `{option}=True`."
            )
        rate = group["lr"]
        if not (isinstance(rate, Tensor) and rate.device.type == device.type):
            found.append(
                f"The learning rate of param group {number} of {name} is {rate!r}, and a graph"
                " would keep it. Pass a tensor on "
                f'{device.type}, `lr=torch.tensor(0.001, device="{device.type}")`; schedulers write'
                " into it."
            )
    return list(dict.fromkeys(found))


class CapturedOptimizer:
    """Stands in for ``optimizer.step``: the closure and hooks run as ever, the update is captured
    once and replayed.

    Learning rates are tensors, which schedulers write into. If anything else in the param groups
    changes, or the tensors of the optimizer's state are other ones, the update runs eagerly and is
    captured anew after that.

    Args:
        optimizer: any that :func:`check_optimizer` has nothing against.
        make_graph: gives a new graph.
        may_capture: whether the gradients are at addresses that stay.
        check: see :func:`check_optimizer`.

    Attributes:
        problems: see :class:`~.graph_ranks.Part`.
    """

    kind = "the optimizer's step"

    def __init__(
        self,
        optimizer: Optimizer,
        make_graph: Callable[[], Graph],
        may_capture: Callable[[], bool],
        check: Callable[[], list[str]],
    ) -> None:
        self._optimizer, self._make_graph, self._may_capture = optimizer, make_graph, may_capture
        self._check = check
        self._eager = optimizer.step
        self._own = optimizer.__dict__.get("step")  # a scheduler's
        self._graph: Graph | None = None
        self._before: dict[str, Any] | None = None  # what the last step found
        self._refused = False
        self.problems: list[str] = []
        self._changes = 0
        self._gradients: list[
            tuple[Tensor, Tensor]
        ] = []  # parameters, and where the graph reads their gradients
        self._scaling: dict[str, Tensor] = {}  # where it reads what the loss scaler says
        self.replays = 0
        optimizer.step = self.step  # type: ignore[method-assign]

    def remove(self) -> None:
        """The optimizer is as it was."""
        self.reset()
        del self._optimizer.step
        if self._own is not None:
            self._optimizer.step = self._own  # type: ignore[method-assign]

    def reset(self) -> None:
        """Free the graph; the next step is eager."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._before, self._gradients, self._scaling = None, None, [], {}

    def refuse(self) -> None:
        """From now on it runs eagerly."""
        self._refused = True
        self.reset()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See :meth:`torch.optim.Optimizer.step`."""
        hooks = [
            *torch_optimizer._global_optimizer_pre_hooks.values(),
            *self._optimizer._optimizer_step_pre_hooks.values(),
        ]
        arguments = {} if closure is None else {"closure": closure}
        for hook in hooks:
            if hook(self._optimizer, (), arguments) is not None:
                raise RuntimeError(
                    f"A step pre-hook of {type(self._optimizer).__name__} replaces arguments, which"
                    " a graph cannot."
                )
        result = None if closure is None else closure()
        self._update()
        hooks = [
            *self._optimizer._optimizer_step_post_hooks.values(),
            *torch_optimizer._global_optimizer_post_hooks.values(),
        ]
        for hook in hooks:
            hook(self._optimizer, (), arguments)
        return result

    def _update(self) -> None:
        optimizer = self._optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it
        update = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # without hooks
        if self._refused or self._changed() or not (self._graph or self._may_capture()):
            update(optimizer)
            self._before = self._state()
            return
        given = self._given()
        if self._graph is None:
            parameters = [
                p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            self._gradients = [(p, p.grad) for p in parameters]
            self._scaling = {name: value.clone() for name, value in given.items()}
            vars(optimizer).update(self._scaling)
            graph = self._make_graph()
            with graph.capture():
                update(optimizer)
            self._graph = graph
            vars(optimizer).update(given)
        for name, value in given.items():
            self._scaling[name].copy_(value)
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                if parameter.grad.data_ptr() != gradient.data_ptr():
                    gradient.copy_(parameter.grad)
                parameter.grad = gradient
        self._graph.replay()
        self.replays += 1
        self._changes = 0

    def _given(self) -> dict[str, Tensor]:
        found = {name: getattr(self._optimizer, name, None) for name in _OF_SCALERS}
        return {name: value for name, value in found.items() if value is not None}

    def _changed(self) -> bool:
        """Whether the update is not that of the last step; then the graph is gone."""
        now, before = self._state(), self._before
        what = next(
            (name for name in now if before is None or not _same(now[name], before.get(name))), None
        )
        if what is None:
            return False
        self.reset()
        self.problems = self._check()
        self._changes += before is not None
        if self._changes > MAX_CHANGES:
            name = type(self._optimizer).__name__
            self.problems.append(
                f"{what} of {name} changes again and again, and a graph would keep it."
            )
        self._refused = bool(self.problems)
        return True

    def _state(self) -> dict[str, Any]:
        """What a captured update depends on, by names; of tensors the objects, not the values."""
        found: dict[str, Any] = {"The loss scaling": tuple(self._given())}
        for number, group in enumerate(self._optimizer.param_groups):
            where = f"of param group {number}"
            found.update(
                {f"`{name}` {where}": value for name, value in group.items() if name != "params"}
            )
            found[f"The list of parameters {where}"] = tuple(group["params"])
            found[f"The set of parameters with gradients {where}"] = tuple(
                p.grad is None for p in group["params"]
            )
            states = [self._optimizer.state.get(p, {}) for p in group["params"]]
            found[f"The state {where}"] = tuple(
                value for state in states for value in state.values()
            )
        return found


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
