"""`CapturedOptimizer`: an optimizer's update as a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .device import CudaGraph
from .fingerprint import state_of
from .program import Part
from .software_graph import SoftwareGraph


class CapturedOptimizer(Part):
    """Replaces ``optimizer.step``: captures the update once, then replays it.

    The closure and the step hooks run as ever. Learning rates may be tensors, which schedulers
    write into. If any other setting of the param groups changes, or other tensors replace those of
    the optimizer's state, the update runs eagerly, and is captured anew after that.
    """

    remedy = (
        "A learning rate may be a tensor, which schedulers write into: `lr=torch.tensor(0.001,"
        ' device="cuda")`. For 16-mixed use `capturable=True` without `fused`.'
    )

    def __init__(self, optimizer: Optimizer, fit: Any) -> None:
        super().__init__("the optimizer's step", fit, optimizer, "step")
        self._optimizer: Any = optimizer
        self._graph: CudaGraph | SoftwareGraph | None = None
        self._last_state: dict[str, Any] = {}  # what the last eager step depended on
        self._gradients: list[Tensor] = []  # where the graph reads them
        is_cuda = fit.device.type == "cuda"
        for group in optimizer.param_groups:
            option = "capturable" if "capturable" in group and is_cuda else "fused"
            if not (group.get(option) or group.get("capturable")):
                self.problems.append(
                    f"{type(optimizer).__name__}, as it was made, has no step that a graph can"
                    " hold: make it with `capturable=True` (or `fused=True`, on the CPU or where"
                    " it has no such option), or leave out `CUDAGraphStep(optimizer=True)`."
                )

    def drop(self) -> None:
        """Free the graph; the next step is eager."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._last_state = None, {}

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the optimizer's ``step``."""
        self.steps += 1
        step = Optimizer.profile_hook_step(self._step)  # which calls the hooks
        return step(self._optimizer, *args, **kwargs)

    def _step(self, optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        result = None if closure is None else closure()
        # `LRScheduler.step` warns unless its replacement of `optimizer.step` has set this.
        optimizer._opt_called = True
        update = partial(type(optimizer).step.__wrapped__, optimizer)  # without hooks
        now, before = self._state(), self._last_state
        changed = [name for name in now if now[name] != before.get(name)]
        if changed and before and not self.is_eager:
            self.recapture(changed)
        if self.is_eager or self.problems or changed:
            update()
            self._last_state = self._state()
            return result
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [p.grad for p in parameters if p.grad is not None]
        if self._graph is None:
            self._gradients, (self._graph, _) = found, self.fit.graphs.make_pair()
            with self._graph.capture():
                update()
        torch._foreach_copy_(self._gradients, found)
        self._graph.replay()
        self.replays += 1
        return result

    def _state(self) -> dict[str, Any]:
        """Return by name what a captured update depends on; of tensors the objects, not values."""
        scale = "`found_inf`, by which 16-mixed tells fused optimizers of overflows,"
        device = self.fit.device
        found = {scale: state_of(getattr(self._optimizer, "found_inf", None), device)}
        for number, group in enumerate(self._optimizer.param_groups):
            where = f"of param group {number}"
            options = [(n, value) for n, value in group.items() if n != "params"]
            found |= {f"`{n}` {where}": state_of(value, device) for n, value in options}
            found[f"The list of parameters, or their state or gradients, {where}"] = [
                (id(each), each)
                for p in group["params"]
                for each in (p, *self._optimizer.state.get(p, {}).values(), p.grad is None)
            ]
        return found
