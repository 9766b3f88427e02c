"""Which communicator to the other ranks is the right one here."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .hybrid import HybridCollectives
from .label_checked import ComparedCollectives
from .pairwise import PairwiseCollectives
from .process_group import GroupCollectives, LocalCollectives
from .shared_memory import SharedMemoryCollectives


def make_collectives(group: dist.ProcessGroup | None, device: torch.device) -> LocalCollectives:
    """The communicator for ``group`` (None: a single process) and tensors on ``device``.

    Host-side agreement uses gloo even beside NCCL, so that it never waits for the device.
    """
    if group is None or dist.get_world_size(group) == 1:
        return LocalCollectives()
    backend = dist.get_backend(group)
    if backend == "gloo" and device.type == "cpu":
        return SharedMemoryCollectives.open(group) or PairwiseCollectives(group)
    if backend == "gloo":
        return ComparedCollectives(group)
    return GroupCollectives(group, group if backend == "fake" else _of_hosts(group, device))


@lru_cache(maxsize=1)  # a process may fit, validate and test many times
def _of_hosts(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    try:
        timeout = group._get_backend(
            device
        ).options._timeout  # the user's; torch would take gloo's default
    except (AttributeError, RuntimeError):  # a back end that has no options
        timeout = None
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", timeout=timeout)


@lru_cache(maxsize=1)
def _mesh(everyone: dist.ProcessGroup, device_type: str, shard_size: int) -> DeviceMesh:
    shape = dist.get_world_size(everyone) // shard_size, shard_size
    return init_device_mesh(device_type, shape, mesh_dim_names=("replica", "shard"))


def make_hybrid_collectives(shard_size: int, device: torch.device) -> LocalCollectives:
    """The communicator for shards over ``shard_size`` neighbouring ranks; collective over all
    ranks.

    Raises:
        ValueError: the ranks do not divide into such groups.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if shard_size < 2 or world_size % shard_size:
        raise ValueError(
            f"shard_size={shard_size} must be at least 2 and divide the number of ranks,"
            f" {world_size}. Take the number of ranks on a node, or `None` to shard over all."
        )
    everyone = make_collectives(dist.group.WORLD, device)
    if shard_size == world_size:
        return everyone
    mesh = _mesh(dist.group.WORLD, device.type, shard_size)
    group = mesh.get_group("shard")
    # All agreement is among everyone, so the shards of NCCL need no group on the host.
    shards = (
        GroupCollectives(group)
        if type(everyone) is GroupCollectives
        else make_collectives(group, device)
    )
    return HybridCollectives(shards, everyone, mesh.get_group("replica"))
