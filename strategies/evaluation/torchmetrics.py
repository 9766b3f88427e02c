"""Gathers states of torchmetrics over ranks of which some had nothing to measure."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors


def prepare_metrics(module: nn.Module, device: torch.device) -> None:
    """Move the metrics in ``module`` to ``device``, and let :func:`gather_states` gather them.

    A metric that has a ``dist_sync_fn`` of its own keeps it.
    """
    for child in module.modules():
        if isinstance(child, Metric):
            child.to(device)
            child.dist_sync_fn = child.dist_sync_fn or gather_states


def gather_states(state: Tensor, group: Any = None) -> list[Tensor]:
    """Return the ``state`` of each rank; collective. Metrics call it as their ``dist_sync_fn``.

    ``gather_all_tensors`` of torchmetrics needs the same number of dimensions and the same dtype on
    all ranks. A rank that saw no sample has an empty float vector, whatever the others' states are,
    and the state of a single sample may have no dimension: ranks would exchange other numbers of
    bytes, which ends processes.
    """
    own_form = tuple(state.shape), state.dtype
    forms: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(forms, own_form, group=group)
    filled = [form for form in forms if 0 not in form[0]]
    shape, dtype = max(filled, key=lambda form: len(form[0]), default=own_form)
    if 0 in state.shape:
        state = state.new_empty((0, *shape[1:]), dtype=dtype)
    needs_dimension = state.dim() == 0 and any(shape for shape, _ in forms)
    return gather_all_tensors(state.reshape(1) if needs_dimension else state, group)
