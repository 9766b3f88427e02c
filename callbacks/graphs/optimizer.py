"""`CapturedOptimizer`: an optimizer's update as a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .device import Graph
from .fingerprint import state_of
from .program import Fit, Part
from .software_graph import replaced

_CAPTURABLE = "Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, ASGD, RMSprop and Rprop"
MAX_CHANGES = 5  # changes of an optimizer's state or settings without a replay in between


class CapturedOptimizer(Part):
    """Replaces ``optimizer.step``: captures the update once, then replays it.

    The closure and the step hooks run as ever. Learning rates may be tensors, which schedulers
    write into. If any other setting of the param groups changes, or other tensors replace those of
    the optimizer's state, the update runs eagerly, and is captured anew after that.

    Args:
        optimizer: the optimizer.
        fit: the fit.
        may_capture: returns whether the gradients are at addresses that stay.

    """

    def __init__(self, optimizer: Optimizer, fit: Fit, may_capture: Callable[[], bool]) -> None:
        super().__init__("the optimizer's step")
        self._optimizer, self._may_capture = optimizer, may_capture
        self._make_graph = fit.graphs.make_graph
        self._graph: Graph | None = None
        self._last_state: dict[str, Any] = {}  # what the last eager step depended on
        self._changes = 0  # since the last replay
        # Parameters, and where the graph reads their gradients.
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._scale: dict[str, Tensor] = {}  # where the graph reads the loss scaling
        is_cuda = fit.device.type == "cuda"
        for group in optimizer.param_groups:
            option = "capturable" if "capturable" in group and is_cuda else "fused"
            if not (group.get(option) or group.get("capturable")):
                self.problems.append(
                    f"{type(optimizer).__name__}, as it was made, has no step that a graph can"
                    f" hold: make it with `{option}=True`. {_CAPTURABLE} of torch.optim take"
                    " `capturable=True`; `CUDAGraphStep(optimizer=False)` leaves the optimizer"
                    " eager."
                )
        # A step that an `LRScheduler` of torch has set on the object.
        self._own_step = vars(optimizer).get("step")
        step = Optimizer.profile_hook_step(self._step)  # which calls the hooks
        optimizer.step = partial(step, optimizer)  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Free the graph and restore the optimizer's ``step``."""
        self.drop()
        del self._optimizer.step
        if self._own_step is not None:
            self._optimizer.step = self._own_step  # type: ignore[method-assign]

    def drop(self) -> None:
        """Free the graph; the next step is eager."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._last_state = None, {}
        self._gradients = []

    def _step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        result = None if closure is None else closure()
        # `LRScheduler.step` warns unless its replacement of `optimizer.step` has set this.
        optimizer._opt_called = True
        update = partial(type(optimizer).step.__wrapped__, optimizer)  # without hooks
        is_due = self._graph is not None or self._may_capture()
        if self.is_eager or self.problems or self._has_changed() or not is_due:
            update()
            self._last_state = self._state()
            return result
        scale = self._find_scale()
        if self._graph is None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._gradients = [(p, g) for p in parameters if (g := p.grad) is not None]
            self._scale = {name: tensor.clone() for name, tensor in scale.items()}
            graph = self._make_graph()
            with replaced(vars(optimizer), self._scale), graph.capture():
                update()
            self._graph = graph
        for name, tensor in scale.items():
            self._scale[name].copy_(tensor)
        for parameter, gradient in self._gradients:
            found = parameter.grad
            if found is not None and found is not gradient:
                if found.data_ptr() != gradient.data_ptr():
                    gradient.copy_(found)
                parameter.grad = gradient
        self._graph.replay()
        self.replays += 1
        self._changes = 0
        return result

    def _find_scale(self) -> dict[str, Tensor]:
        """Return what `torch.amp.GradScaler.step` sets on a fused optimizer, in new tensors."""
        found = {name: getattr(self._optimizer, name, None) for name in ("grad_scale", "found_inf")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _has_changed(self) -> bool:
        """Return whether the update differs from that of the last step; then free the graph."""
        now, before = self._state(), self._last_state
        changed = next((name for name in now if now[name] != before.get(name)), None)
        if changed is None:
            return False
        self.drop()
        self._changes += bool(before)
        if self._changes > MAX_CHANGES:
            self.problems.append(
                f"{changed} of {type(self._optimizer).__name__} changes again and again, and a"
                " graph would keep it. A learning rate may be a tensor, which schedulers write"
                ' into: `lr=torch.tensor(0.001, device="cuda")`.'
            )
        return True

    def _state(self) -> dict[str, Any]:
        """Return by name what a captured update depends on; of tensors the objects, not values."""
        found: dict[str, Any] = {"The loss scaling": list(self._find_scale())}
        for number, group in enumerate(self._optimizer.param_groups):
            where = f"of param group {number}"
            found |= {f"`{n}` {where}": state_of(v) for n, v in group.items() if n != "params"}
            params = group["params"]
            states = [v for p in params for v in self._optimizer.state.get(p, {}).values()]
            found[f"The list of parameters, or their state, {where}"] = [
                (id(value), value) for value in [*params, *states]
            ]
            found[f"The set of parameters with gradients {where}"] = [
                p.grad is None for p in params
            ]
        return found
