"""What this machine offers a process: devices, NUMA nodes, CPUs, threads and layers that need a
GPU.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .world import Devices

_SYS = Path("/sys")


def visible_devices(device_type: str | None = None) -> Devices:
    """What torch sees.

    Args:
        device_type: by default torch's accelerator, or the CPU where there is none.
    """
    if device_type is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        device_type = "cpu" if found is None else found.type
    count = 1 if device_type == "cpu" else torch.get_device_module(device_type).device_count()
    return Devices(
        device_type, count, dist.Backend.default_device_backend_map.get(device_type, "gloo")
    )


def parse_cpu_list(text: str) -> set[int]:
    """CPUs of a list as Linux writes it.

    >>> sorted(parse_cpu_list("0-2,8"))
    [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def numa_node_of(device: torch.device, sys: Path = _SYS) -> int | None:
    """The NUMA node that a GPU hangs on, None where Linux does not say."""
    if device.type != "cuda":
        return None
    p = torch.cuda.get_device_properties(device)
    return numa_node_of_pci(
        f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0", sys
    )


def numa_node_of_pci(address: str, sys: Path = _SYS) -> int | None:
    """The same by PCI address."""
    file = sys / "bus/pci/devices" / address / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return node if node >= 0 else None  # -1: the firmware does not say


def cpus_of_numa_node(node: int, sys: Path = _SYS) -> set[int]:
    """CPUs of a NUMA node; empty where Linux does not say."""
    file = sys / f"devices/system/node/node{node}/cpulist"
    return parse_cpu_list(file.read_text()) if file.exists() else set()


def online_cpus(sys: Path = _SYS) -> set[int]:
    """CPUs of the machine, those included that this process may not use."""
    file = sys / "devices/system/cpu/online"
    return parse_cpu_list(file.read_text()) if file.exists() else set(range(os.cpu_count() or 1))


def choose_cpus(
    allowed: Collection[int], online: Collection[int], near: Collection[int]
) -> set[int] | None:
    """CPUs to bind this process to, None to leave it as it is.

    Args:
        allowed: where it may run now.
        online: all of the machine.
        near: those of its GPU's NUMA node.
    """
    # Fewer than all: a launcher, a container or the user has chosen already.
    chosen = set(near) & set(allowed)
    return chosen if set(allowed) >= set(online) and chosen and chosen != set(allowed) else None


def bind_to_numa_node(device: torch.device) -> set[int] | None:
    """Run this process, and the workers it will start, near its GPU; returns the CPUs if it was
    bound.
    """
    node = numa_node_of(device) if hasattr(os, "sched_setaffinity") else None
    if node is None:
        return None
    cpus = choose_cpus(os.sched_getaffinity(0), online_cpus(), cpus_of_numa_node(node))
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    return cpus


def threads_per_process(environ: Mapping[str, str], cpus: int, local_world_size: int) -> int | None:
    """Threads for OpenMP and MKL in each process of a node, None to leave them as they are.

    Args:
        environ: variables; a user's or torchrun's OMP_NUM_THREADS or MKL_NUM_THREADS stands.
        cpus: where this process may run.
        local_world_size: processes on this node.
    """
    if "OMP_NUM_THREADS" in environ or "MKL_NUM_THREADS" in environ or local_world_size == 1:
        return None
    own = environ.get("SLURM_CPUS_PER_TASK", "")
    if own.isdecimal() and int(own) > 0:
        return min(int(own), cpus)  # srun's --cpu-bind has divided the node already
    return max(1, cpus // local_world_size)


def limit_threads(local_world_size: int) -> int | None:
    """Share the CPUs out among the processes of this node; returns the number of threads if it was
    changed.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads_per_process(os.environ, cpus, local_world_size)
    if threads is not None:
        torch.set_num_threads(threads)
    return threads


def require_sync_batch_norm(module: nn.Module, device: torch.device) -> None:
    """Try torch's SyncBatchNorm before the layers of ``module`` become such; collective where torch
    has it for ``device``.

    Raises:
        ValueError: it does not run there, and a layer would need it.
    """
    needs = (
        name
        for name, child in module.named_modules()
        if isinstance(child, _BatchNorm) and child.training
    )
    name = next(needs, None)
    if device.type != "cpu" or name is None:
        return
    try:
        nn.SyncBatchNorm(1, device=device)(torch.zeros(2, 1, device=device))
    except ValueError as error:
        raise ValueError(
            f"Trainer(sync_batchnorm=True): torch's SyncBatchNorm, which {name!r} would become,"
            f" needs GPUs ({error}), and this run is on the CPU. Leave `sync_batchnorm` out: each"
            " rank normalises with the statistics of its own batch, and rank 0's running"
            " statistics count. For those of the joined batch, train on GPUs."
        ) from error
