"""Which door to the other ranks is the right one here."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .collectives import GroupCollectives, LocalCollectives, PairwiseCollectives
from .shared import SharedMemoryCollectives


def make_collectives(group: dist.ProcessGroup | None, device: torch.device) -> LocalCollectives:
    """The door for ``group`` (None: a single process) and tensors on ``device``.

    Host-side agreement uses gloo even beside NCCL, so that it never waits for the device.
    """
    if group is None or dist.get_world_size(group) == 1:
        return LocalCollectives()
    backend = dist.get_backend(group)
    if backend == "gloo" and device.type == "cpu":
        return SharedMemoryCollectives.open(group) or PairwiseCollectives(group)
    ranks = dist.get_process_group_ranks(group)
    control = group if backend in ("gloo", "fake") else dist.new_group(ranks, backend="gloo")
    return GroupCollectives(group, control)
