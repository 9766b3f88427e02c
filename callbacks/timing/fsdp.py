"""Measure the time that FSDP2 (`fully_shard`) spends in its collectives."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...strategies.collectives import CallTimer


class FSDPCommunication:
    """Times all gathers and reductions of a model's `FSDPModule`s by a :class:`CallTimer`.

    Until :meth:`close` each object that starts collectives is of a subclass of its own class, so
    that torch's `isinstance` checks still hold.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._timer = CallTimer(device)
        self._starters = list({id(starter): starter for starter in _starters(model)}.values())
        for starter in self._starters:
            kind = type(starter)
            starter.__class__ = type(
                kind.__name__, (kind,), {"__call__": self._timer.timed(kind.__call__)}
            )

    def __bool__(self) -> bool:
        return bool(self._starters)

    def seconds(self) -> float:
        """Return the seconds of all collectives that the device has finished."""
        return self._timer.seconds()

    def close(self) -> None:
        """Stop timing."""
        for starter in self._starters:
            starter.__class__ = type(starter).__base__
        self._starters = []


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
