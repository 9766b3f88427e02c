"""Dispatch: rank 0 reads for all ranks and sends each rank its batches.

The messages have a process group of their own, on CPU, so that they cannot meet the collectives of
the training step. A rank gets no other rank's batch, but the position after each row.
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from .base_feed import Pairs


def dispatch(pairs: Pairs, group: dist.ProcessGroup) -> Pairs:
    """Yield this rank's batches, each with the position after its row.

    Args:
        pairs: on rank 0, the batches of all ranks, row by row and in rank order; read there alone.
        group: all ranks, on gloo.
    """
    if dist.get_rank(group) == 0:
        return _send_rows(pairs, group)
    return iter(partial(_receive, group), None)


def _send_rows(pairs: Pairs, group: dist.ProcessGroup) -> Pairs:
    others = range(1, dist.get_world_size(group))
    while row := list(islice(pairs, len(others) + 1)):
        position = row[-1][1]
        # The last row may lack the batches of the last ranks.
        for rank, (batch, _) in enumerate(row[1:], 1):
            # A clone, because a view would be pickled with all the memory that it looks into.
            pair = tree_map_only(torch.Tensor, torch.clone, batch), position
            dist.send_object_list([pair], rank, group)
        yield row[0][0], position
    for rank in others:
        dist.send_object_list([None], rank, group)


def _receive(group: dist.ProcessGroup) -> Any:
    pair = [None]
    dist.recv_object_list(pair, 0, group)
    return pair.pop()
