"""`CapturedOptimizer`: an optimizer's update as a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from .device import Graph

_CAPTURABLE = "Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, ASGD, RMSprop and Rprop"
# Attributes that `torch.amp.GradScaler.step` sets on an optimizer that unscales gradients itself.
_SCALER_ATTRIBUTES = ("grad_scale", "found_inf")
MAX_CHANGES = 5  # changes of an optimizer's state or settings without a replay in between


def check_optimizer(optimizer: Optimizer, device: torch.device) -> list[str]:
    """Return why the step of ``optimizer``, with parameters on ``device``, cannot be captured."""
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
    """Replaces ``optimizer.step``: captures the update once, then replays it.

    The closure and the step hooks run as ever. Learning rates are tensors, which schedulers write
    into. If any other setting of the param groups changes, or other tensors replace those of the
    optimizer's state, the update runs eagerly, and is captured anew after that.

    Args:
        optimizer: an optimizer for which :func:`check_optimizer` finds nothing.
        make_graph: returns a new graph.
        may_capture: returns whether the gradients are at addresses that stay.
        check: calls :func:`check_optimizer` for ``optimizer``.

    Attributes:
        problems: see :class:`~.ranks.Part`.
        replays: number of replayed updates.
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
        # A step that an `LRScheduler` of torch has set on the object.
        self._own_step = optimizer.__dict__.get("step")
        self._graph: Graph | None = None
        self._last_state: dict[str, Any] | None = None  # what the last eager step depended on
        self._is_eager = False  # from now on
        self.problems: list[str] = []
        self._changes = 0  # since the last replay
        # Parameters, and where the graph reads their gradients.
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._scaler_tensors: dict[str, Tensor] = {}  # where the graph reads the loss scaling
        self.replays = 0
        optimizer.step = self.step  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Free the graph and restore the optimizer's ``step``."""
        self.reset()
        del self._optimizer.step
        if self._own_step is not None:
            self._optimizer.step = self._own_step  # type: ignore[method-assign]

    def reset(self) -> None:
        """Free the graph; the next step is eager."""
        if self._graph is not None:
            self._graph.reset()
        self._graph = self._last_state = None
        self._gradients, self._scaler_tensors = [], {}

    def stop_capturing(self) -> None:
        """Run the update eagerly from now on."""
        self._is_eager = True
        self.reset()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See :meth:`torch.optim.Optimizer.step`."""
        hooks = [
            *torch_optimizer._global_optimizer_pre_hooks.values(),
            *self._optimizer._optimizer_step_pre_hooks.values(),
        ]
        arguments: dict[str, Any] = {} if closure is None else {"closure": closure}
        for hook in hooks:
            if (changed := hook(self._optimizer, (), arguments)) is not None:
                arguments = changed[1]
        closure = arguments.get("closure")
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
        # `LRScheduler.step` warns unless its replacement of `optimizer.step` has set this.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        update = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]  # without hooks
        if self._is_eager or self._reset_if_changed() or not (self._graph or self._may_capture()):
            update(optimizer)
            self._last_state = self._state()
            return
        scaler_tensors = self._find_scaler_tensors()
        if self._graph is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._gradients = [(p, g) for p in parameters if (g := p.grad) is not None]
            self._scaler_tensors = {name: t.clone() for name, t in scaler_tensors.items()}
            vars(optimizer).update(self._scaler_tensors)
            graph = self._make_graph()
            with graph.capture():
                update(optimizer)
            self._graph = graph
            vars(optimizer).update(scaler_tensors)
        for name, tensor in scaler_tensors.items():
            self._scaler_tensors[name].copy_(tensor)
        for parameter, gradient in self._gradients:
            found = parameter.grad
            if found is not None and found is not gradient:
                if found.data_ptr() != gradient.data_ptr():
                    gradient.copy_(found)
                parameter.grad = gradient
        self._graph.replay()
        self.replays += 1
        self._changes = 0

    def _find_scaler_tensors(self) -> dict[str, Tensor]:
        found = {name: getattr(self._optimizer, name, None) for name in _SCALER_ATTRIBUTES}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _reset_if_changed(self) -> bool:
        """Return whether the update differs from that of the last step; then free the graph."""
        now, before = self._state(), self._last_state
        changed = next(
            (name for name in now if before is None or not _is_same(now[name], before.get(name))),
            None,
        )
        if changed is None:
            return False
        self.reset()
        self.problems = self._check()
        self._changes += before is not None
        if self._changes > MAX_CHANGES:
            name = type(self._optimizer).__name__
            self.problems.append(
                f"{changed} of {name} changes again and again, and a graph would keep it."
            )
        self._is_eager = bool(self.problems)
        return True

    def _state(self) -> dict[str, Any]:
        """Return by name what a captured update depends on; of tensors the objects, not values."""
        found: dict[str, Any] = {"The loss scaling": tuple(self._find_scaler_tensors())}
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


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
