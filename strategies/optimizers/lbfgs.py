"""LBFGS on shards: each rank has its part of the long vectors.

Scalar products are sums over all ranks.

Source of the method: Liu and Nocedal, On the limited memory BFGS method for large scale
optimization, 1989.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import LocalCollectives
from ..engine import Entry, StandIns, State, Zero3Engine
from ..support.torch_internals import DisableTorchFunctionSubclass

_REDUCTIONS = {"dot": "sum", "sum": "sum", "max": "max"}
_ELEMENTWISE = frozenset(
    ("abs", "neg", "sub", "mul", "add_", "copy_", "clone", "view_as", "__getitem__")
)


class LongVector(StandIns):
    """Lets an LBFGS optimizer step on shards, with the same decisions on all ranks.

    The optimizer gets the mean over ranks of a closure's loss: it compares losses, and stops by
    them.
    """

    needed_before_closure = True  # LBFGS looks for its history before it calls the closure

    def __init__(self, engine: Zero3Engine, optimizer: Any) -> None:  # LBFGS
        super().__init__(engine)
        # a rank may own nothing of any parameter, and vectors need an element
        self._tail = nn.Parameter(torch.zeros(1, device=engine.device))
        known = {"collectives": engine.collectives, "optimizer": type(optimizer).__name__}
        vector = type("DistributedVector", (DistributedVector,), known)
        # `torch.optim.LBFGS.step` makes all its vectors from what this method returns.
        gather = type(optimizer)._gather_flat_grad
        optimizer._gather_flat_grad = lambda: gather(optimizer).as_subclass(vector)

    def of(self, groups: Sequence[Sequence[Entry]]) -> list[list[nn.Parameter]]:
        """See :meth:`StandIns.of`; `torch.optim.LBFGS` has all in its only group."""
        return [[*super().of(groups)[0], self._tail]]

    def whole_state(self, entry: Entry, state: dict[Any, State]) -> State:
        """See :meth:`StandIns.whole_state`."""
        raise ValueError(
            "The state of LBFGS is of all parameters together, each rank's part of it, and has"
            f" nothing of parameter {entry.name!r} alone."
        )

    def convert_loss(self, value: Any) -> Any:
        """Return the mean of ``value`` over ranks; collective."""
        mine = torch.as_tensor(value, device=self.engine.device).detach()
        everyone = self.engine.collectives.all_gather_object(mine.item())
        return mine.new_tensor(sum(everyone) / len(everyone))


class DistributedVector(Tensor):
    """This rank's part of a vector [n]; scalar products, sums and maxima are collective."""

    collectives: LocalCollectives
    optimizer: str  # name of the optimizer's class, for errors

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Compute elementwise functions locally and reductions over all ranks.

        Raises:
            NotImplementedError: any other function, whose result may be wrong on a part.
        """
        name = func.__name__
        with DisableTorchFunctionSubclass():
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
