"""States of torchmetrics over ranks of which some had nothing to measure."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors


def share_metrics(module: nn.Module, device: torch.device) -> None:
    """Have the metrics in ``module`` on ``device``, and their states gathered by
    :func:`gather_states`.
    """
    for child in module.modules():
        if isinstance(child, Metric):
            child.to(device)
            child.dist_sync_fn = child.dist_sync_fn or gather_states


def gather_states(state: Tensor, group: Any = None) -> list[Tensor]:
    """Each rank's ``state``, a ``dist_sync_fn``; collective.

    Torchmetrics has an empty vector of floats where a rank saw no sample, whatever the others'
    states are, and a state of one sample may be without a dimension: exchanges of other bytes on
    each rank, which end processes.
    """
    mine = tuple(state.shape), state.dtype
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    filled = [each for each in everyone if 0 not in each[0]]
    shape, dtype = max(filled, key=lambda each: len(each[0]), default=mine)
    if 0 in state.shape:
        state = state.new_empty((0, *shape[1:]), dtype=dtype)
    one_by_itself = state.dim() == 0 and any(shape for shape, _ in everyone)
    return gather_all_tensors(state.reshape(1) if one_by_itself else state, group)
