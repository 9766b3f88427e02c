"""LBFGS on shards: its long vectors are this rank's parts, and its scalar products are sums over
all ranks.

Source of the method: Liu and Nocedal, On the limited memory BFGS method for large scale
optimization, 1989.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS

from ..collectives import LocalCollectives
from ..engine import Zero3Engine
from .substituted_step import Substitution

_REDUCTIONS = {"dot": "sum", "sum": "sum", "max": "max"}
_ELEMENTWISE = frozenset(
    ("abs", "neg", "sub", "mul", "add_", "copy_", "clone", "view_as", "__getitem__")
)


class LongVector(Substitution):
    """Lets an LBFGS optimizer step on the flat tensors uncut, by decisions that all ranks take
    alike.

    A closure's loss is the mean over ranks to the optimizer, which compares losses and stops by
    them.
    """

    early = True  # LBFGS looks for its history before it calls the closure

    def __init__(self, engine: Zero3Engine, index: int, optimizer: LBFGS) -> None:
        super().__init__(engine, index, optimizer)
        optimizer.state.clear()
        self._flats = [flat for flat in engine.groups if flat.key.optimizer == index]
        self._whole = [nn.Parameter(flat.data) for flat in self._flats]
        known = {"collectives": engine.collectives, "optimizer": type(optimizer).__name__}
        vector = type("DistributedVector", (DistributedVector,), known)
        gather = type(optimizer)._gather_flat_grad
        optimizer._gather_flat_grad = lambda: gather(optimizer).as_subclass(vector)

    def load(self) -> list[list[nn.Parameter]]:
        """See :meth:`Substitution.load`."""
        for flat, whole in zip(self._flats, self._whole, strict=True):
            whole.grad = flat.grad if flat.shows_gradients else None
        return [self._whole]

    def store(self) -> None:
        """Nothing: the flat tensors themselves were updated."""

    def loss(self, value: Any) -> Any:
        """The mean over ranks."""
        mine = torch.as_tensor(value, device=self.engine.device).detach()
        everyone: list[Any] = self.engine.collectives.all_gather_object(mine.item())
        return mine.new_tensor(sum(everyone) / len(everyone))


class DistributedVector(Tensor):
    """This rank's part of a vector. Scalar products, sums and maxima are those of the whole;
    collective.
    """

    collectives: LocalCollectives
    optimizer: str  # its class, for errors

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Elementwise, or reduced over all ranks, or an error: nothing else is known to be
        right.
        """
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if name in _REDUCTIONS and isinstance(result, Tensor) and not result.dim():
                return cls.collectives.all_reduce(result.clone(), _REDUCTIONS[name])
            if name in _ELEMENTWISE:
                return result.as_subclass(cls) if type(result) is Tensor else result
            if name == "__get__":
                return result
        raise NotImplementedError(
            f"{cls.optimizer} takes the `{name}` of a vector that is sharded over the ranks, which"
            " torch.optim.LBFGS does not. Use that."
        )
