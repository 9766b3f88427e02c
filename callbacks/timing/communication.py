"""The time that zero3 and FSDP2 (`fully_shard`) spend in their collectives."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .clocks import CallTimer


class Communication:
    """Times collectives by a :class:`CallTimer`: of zero3's communicator, if there is ``engine``,
    else all gathers and reductions of a model's `FSDPModule`s.

    Until :meth:`close` the communicator's methods are timed ones, because the units refer to this
    very object, and each object that starts collectives of FSDP2 is of a subclass of its own class,
    so that torch's `isinstance` checks still hold.
    """

    def __init__(self, engine: Any, model: nn.Module, device: torch.device) -> None:
        self._timer = timer = CallTimer(device)
        self._communicator: Any = None if engine is None else engine.collectives
        names = ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]
        # On CUDA agreements do not count: ranks agree on the host, without the device.
        names += ["agree"] * timer.on_host
        self._methods = {name: getattr(self._communicator, name) for name in names if engine}
        for name, method in self._methods.items():
            setattr(self._communicator, name, timer.timed(method))
        starters = () if engine else _starters(model)
        self._starters = list({id(starter): starter for starter in starters}.values())
        for starter in self._starters:
            kind = type(starter)
            starter.__class__ = type(
                kind.__name__, (kind,), {"__call__": timer.timed(kind.__call__)}
            )

    def seconds(self) -> float | None:
        """The seconds of all collectives that the device has finished; None if there are none to
        time.
        """
        return self._timer.seconds() if self._methods or self._starters else None

    def close(self) -> None:
        """Stop timing."""
        for name, method in self._methods.items():
            setattr(self._communicator, name, method)
        for starter in self._starters:
            starter.__class__ = type(starter).__base__
        self._methods, self._starters = {}, []


def _starters(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # Before torch 2.13 `FSDPState` has one group, without a list.
            groups = getattr(state, "_fsdp_param_groups", None)
            for group in groups or [getattr(state, "_fsdp_param_group", None)]:
                for name in ("_all_gather_comm", "_reduce_scatter_comm"):
                    if hasattr(group, name):
                        yield getattr(group, name)
