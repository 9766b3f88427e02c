"""What this machine offers a process: devices and threads."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist

from .world import Devices


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
