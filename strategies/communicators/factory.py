"""The choice of a communicator, by process group, back end and device."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..collectives import ComparedCollectives, GroupCollectives, HybridCollectives, LocalCollectives
from .shared_memory import SharedMemoryCollectives


def make_collectives(group: dist.ProcessGroup | None, device: torch.device) -> LocalCollectives:
    """Make the communicator for ``group`` (None: a single process) and tensors on ``device``.

    Ranks agree on the host over gloo even beside NCCL, so that they never wait for the device.
    Collective over ``group``.
    """
    if group is None or dist.get_world_size(group) == 1:
        return LocalCollectives()
    backend = dist.get_backend(group)
    if backend == "gloo":
        is_local = device.type == "cpu"
        return (is_local and SharedMemoryCollectives.open(group)) or ComparedCollectives(group)
    return GroupCollectives(group, group if backend == "fake" else _make_host_group(group, device))


@lru_cache(maxsize=1)  # a process may fit, validate and test many times
def _make_host_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Make a gloo group of the ranks of ``group``, with the timeout that the user chose for it."""
    try:
        # Without a timeout `dist.new_group` would take gloo's default.
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # a back end that has no options
        timeout = None
    return dist.new_group(dist.get_process_group_ranks(group), backend="gloo", timeout=timeout)


@lru_cache(maxsize=1)  # as above: each mesh makes process groups
def _make_mesh(everyone: dist.ProcessGroup, device_type: str, shard_size: int) -> DeviceMesh:
    """Make a mesh [replicas, shard_size] of all ranks."""
    shape = dist.get_world_size(everyone) // shard_size, shard_size
    return init_device_mesh(device_type, shape, mesh_dim_names=("replica", "shard"))


def make_hybrid_collectives(shard_size: int, device: torch.device) -> LocalCollectives:
    """Make the communicator for shards over ``shard_size`` neighbouring ranks.

    Collective over all ranks.

    Raises:
        ValueError: ``shard_size`` is below 2 or does not divide the number of ranks.
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
    mesh = _make_mesh(dist.group.WORLD, device.type, shard_size)
    group = mesh.get_group("shard")
    # Ranks agree among everyone, so the shard groups of NCCL need no gloo group on the host.
    shards = (
        GroupCollectives(group)
        if type(everyone) is GroupCollectives
        else make_collectives(group, device)
    )
    return HybridCollectives(shards, everyone, mesh.get_group("replica"))
