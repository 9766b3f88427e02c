"""Joins the states of torchmetrics over ranks, of which some had less or nothing to measure.

torchmetrics gathers tensor by tensor. Ranks with lists of different lengths would take part in
different numbers of exchanges, and ranks whose states have other shapes or dtypes in exchanges of
different sizes: processes hang or end. Here all states of a metric make one exchange.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from ..data.tensor_pickle import dump

_NOTHING = object()


def prepare_metrics(module: nn.Module, others: Iterable[object], device: torch.device) -> None:
    """Let :func:`sync_states` join the metrics of ``module`` and of ``others``, as callbacks are.

    Metrics that are submodules of ``module`` move to ``device``. Metrics in lists and dicts are
    found too. One with a ``dist_sync_fn`` or a ``_sync_dist`` of the user's keeps it.
    """
    for child in module.modules():
        if isinstance(child, Metric):
            child.to(device)
    # `modules` does not look into lists and dicts.
    for owner in (*module.modules(), *others):
        for leaf in tree_leaves([owner, vars(owner)]):
            for metric in leaf.modules() if isinstance(leaf, nn.Module) else ():
                if (
                    isinstance(metric, Metric)
                    and metric.dist_sync_fn is None
                    # else it is the user's
                    and type(metric)._sync_dist.__module__.startswith("torchmetrics.")
                ):
                    metric._sync_dist = partial(sync_states, metric)  # type: ignore[method-assign]


def sync_states(metric: Metric, dist_sync_fn: Any = None, process_group: Any = None) -> None:
    """Replace the states of ``metric`` by those of all ranks, joined; collective.

    Lists are joined in the order of the samples, as one process would have them: the first element
    of each rank, then the second of each.
    """
    group = process_group or metric.process_group
    states = [getattr(metric, name) for name in metric._reductions]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, dump(states).tobytes(), group=group)
    everyone = [_move(pickle.loads(data), metric.device) for data in everyone]
    everyone[dist.get_rank(group)] = states  # which know how they were computed
    reductions: dict[str, Any] = metric._reductions
    joined: Any
    for (name, reduction), values in zip(
        reductions.items(), zip(*everyone, strict=True), strict=True
    ):
        if reduction is dim_zero_cat or any(isinstance(value, list) for value in values):
            lists = [value if isinstance(value, list) else [value] for value in values]
            rows = zip_longest(*lists, fillvalue=_NOTHING)
            joined = [value for row in rows for value in row if value is not _NOTHING]
        else:
            # A rank that saw no sample may have the state as it was made, a single number.
            joined = torch.stack(torch.broadcast_tensors(*values))
        is_reduced = reduction is not None and len(joined) > 0
        setattr(metric, name, reduction(joined) if is_reduced else joined)


def _move(state: Any, device: torch.device) -> Any:
    if isinstance(state, list):
        return [_move(element, device) for element in state]
    return state.to(device) if isinstance(state, Tensor) else state
