"""What this machine offers a process: devices, NUMA nodes, CPUs, threads, SyncBatchNorm."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .world import Devices

_SYS = Path("/sys")


def visible_devices(device_type: str | None = None) -> Devices:
    """Return the devices that torch sees.

    Args:
        device_type: by default that of torch's accelerator, or "cpu" if there is none.
    """
    if device_type is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        device_type = "cpu" if found is None else found.type
    count = 1 if device_type == "cpu" else torch.get_device_module(device_type).device_count()
    return Devices(
        device_type, count, dist.Backend.default_device_backend_map.get(device_type, "gloo")
    )


def parse_cpu_list(text: str) -> set[int]:
    """Parse a list of CPUs as Linux writes it.

    >>> sorted(parse_cpu_list("0-2,8"))
    [0, 1, 2, 8]
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def numa_node_of(device: torch.device, sys: Path = _SYS) -> int | None:
    """Return the NUMA node of a GPU; None if Linux does not know it, or for another device."""
    if device.type != "cuda":
        return None
    p: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the address
    return numa_node_of_pci(
        f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0", sys
    )


def numa_node_of_pci(address: str, sys: Path = _SYS) -> int | None:
    """Return the NUMA node of the device at a PCI address; None if Linux does not know it."""
    file = sys / "bus/pci/devices" / address / "numa_node"
    node = int(file.read_text()) if file.exists() else -1
    return node if node >= 0 else None  # -1: the firmware reports none


def cpus_of_numa_node(node: int, sys: Path = _SYS) -> set[int]:
    """Return the CPUs of a NUMA node; empty if Linux does not list them."""
    file = sys / f"devices/system/node/node{node}/cpulist"
    return parse_cpu_list(file.read_text()) if file.exists() else set()


def online_cpus(sys: Path = _SYS) -> set[int]:
    """Return all CPUs of the machine, also those that this process may not use."""
    file = sys / "devices/system/cpu/online"
    return parse_cpu_list(file.read_text()) if file.exists() else set(range(os.cpu_count() or 1))


def choose_cpus(
    allowed: Collection[int], online: Collection[int], near: Collection[int]
) -> set[int] | None:
    """Return the CPUs to bind this process to; None to change nothing.

    Args:
        allowed: CPUs that this process may use now.
        online: all CPUs of the machine.
        near: CPUs of its GPU's NUMA node.
    """
    # A process that may use fewer than all was bound by a launcher, a container or the user.
    chosen = set(near) & set(allowed)
    return chosen if set(allowed) >= set(online) and chosen and chosen != set(allowed) else None


def bind_to_numa_node(device: torch.device) -> set[int] | None:
    """Bind this process, and workers that it will start, to its GPU's NUMA node.

    Returns the CPUs, or None if the process stays as it is.
    """
    node = numa_node_of(device) if hasattr(os, "sched_setaffinity") else None
    if node is None:
        return None
    cpus = choose_cpus(os.sched_getaffinity(0), online_cpus(), cpus_of_numa_node(node))
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    return cpus


def threads_per_process(environ: Mapping[str, str], cpus: int, local_world_size: int) -> int | None:
    """Return the number of threads for OpenMP and MKL in each process; None to change nothing.

    Args:
        environ: variables; OMP_NUM_THREADS or MKL_NUM_THREADS of the user or torchrun stays valid.
        cpus: number of CPUs that this process may use.
        local_world_size: number of processes on this node.
    """
    if "OMP_NUM_THREADS" in environ or "MKL_NUM_THREADS" in environ or local_world_size == 1:
        return None
    own = environ.get("SLURM_CPUS_PER_TASK", "")
    if own.isdecimal() and int(own) > 0:
        return min(int(own), cpus)  # srun's --cpu-bind has divided the node already
    return max(1, cpus // local_world_size)


def limit_threads(local_world_size: int) -> int | None:
    """Share the CPUs among the processes of this node.

    Returns this process's new number of threads, or None if it stays as it is.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads_per_process(os.environ, cpus, local_world_size)
    if threads is not None:
        torch.set_num_threads(threads)
    return threads


def require_sync_batch_norm(module: nn.Module, device: torch.device) -> None:
    """Require that torch's SyncBatchNorm runs on ``device`` if a layer of ``module`` becomes one.

    Collective if torch has it for ``device``.

    Raises:
        ValueError: SyncBatchNorm does not run on ``device``, and a layer would become one.
    """
    names = (
        name
        for name, child in module.named_modules()
        if isinstance(child, _BatchNorm) and child.training
    )
    name = next(names, None)
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
