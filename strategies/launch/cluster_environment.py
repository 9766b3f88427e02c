"""Lightning's cluster environments: check them against our record, fill in one that is missing."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import (
    KubeflowEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from typing_extensions import override

from .detect import detect
from .launchers import INTEL_MPI, KUBEFLOW, MVAPICH, OPEN_MPI, VARIABLES, find_launcher
from .world import Devices, LaunchError, Request, World, require_devices, require_requested

_BY_MPI = (OPEN_MPI, MVAPICH, INTEL_MPI)
# Environments that read the variables that `detect` reads too. MPIEnvironment asks mpi4py instead.
_BY_VARIABLES = (KubeflowEnvironment, LSFEnvironment, SLURMEnvironment, TorchElasticEnvironment)
# The variables that LightningEnvironment and Lightning's launchers for it read.
_LIGHTNING_VARIABLES = (
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class DetectedEnvironment(ClusterEnvironment):
    """The environment of processes that Lightning does not recognise.

    MPI has started them (without ``mpi4py``), or another launcher has set torch's variables.
    """

    def __init__(self) -> None:
        self._world = detect(os.environ, Devices())

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self._world.main_address

    @property
    @override
    def main_port(self) -> int:
        return self._world.main_port

    @staticmethod
    @override
    def detect() -> bool:
        return find_launcher(os.environ) in (*_BY_MPI, VARIABLES)

    @override
    def world_size(self) -> int:
        return self._world.world_size

    @override
    def set_world_size(self, size: int) -> None:
        """Ignored: the launcher has decided."""

    @override
    def global_rank(self) -> int:
        return self._world.rank

    @override
    def set_global_rank(self, rank: int) -> None:
        """Ignored: the launcher has decided."""

    @override
    def local_rank(self) -> int:
        return self._world.local_rank

    @override
    def node_rank(self) -> int:
        return self._world.node_rank


def choose_environment(plugin: ClusterEnvironment) -> ClusterEnvironment:
    """Return the environment to use where Lightning has chosen ``plugin``."""
    launcher = find_launcher(os.environ)
    if type(plugin) is LightningEnvironment and launcher is KUBEFLOW:
        return KubeflowEnvironment()
    # Lightning's `SLURMEnvironment.detect` takes mpirun in a SLURM job for srun. There the SLURM
    # variables describe mpirun's own helper processes.
    if type(plugin) in (LightningEnvironment, SLURMEnvironment) and launcher in _BY_MPI:
        return DetectedEnvironment()
    if type(plugin) is LightningEnvironment and launcher is VARIABLES:
        return DetectedEnvironment()
    return plugin


def identify(plugin: ClusterEnvironment, devices: Devices, request: Request) -> World:
    """Return this process's record, after a check that the cluster environment agrees with it.

    Raises:
        LaunchError: variables, plugin, Trainer and devices contradict each other.
    """
    environ = dict(os.environ)
    if type(plugin) is LightningEnvironment:
        # The user may have chosen it, where Lightning would have taken another, to start processes
        # in spite of a launcher, whose variables then do not count.
        environ = {name: environ[name] for name in _LIGHTNING_VARIABLES if name in environ}
    elif type(plugin) not in (*_BY_VARIABLES, DetectedEnvironment):
        return _make_world(plugin, devices, request)
    world = detect(environ, devices, request)
    reported = {
        "rank": plugin.global_rank(),
        "local_rank": plugin.local_rank(),
        "world_size": plugin.world_size(),
    }
    for item, value in reported.items():
        if getattr(world, item) != value:
            raise LaunchError(
                f"{type(plugin).__name__} says {item} {value}, but {world.because(item)} says"
                f" {getattr(world, item)}. Unset the variables that another launcher or an earlier"
                " Trainer has left, or pass the right environment to Trainer(plugins=...)."
            )
    return world


def _make_world(plugin: ClusterEnvironment, devices: Devices, request: Request) -> World:
    """Make the record from what ``plugin``, an environment of the user's own, reports."""
    name = type(plugin).__name__
    local_world_size, reason = _local_world_size(plugin, request)
    values: dict[str, Any] = {
        "rank": plugin.global_rank(),
        "local_rank": plugin.local_rank(),
        "node_rank": plugin.node_rank(),
        "world_size": plugin.world_size(),
        "main_address": plugin.main_address,
        "main_port": plugin.main_port,
    }
    world = World(
        launcher=name,
        **values,
        local_world_size=local_world_size,
        device_type=devices.type,
        backend=request.backend or devices.backend,
        why=(
            ("launcher", "Trainer(plugins=...)"),
            *((item, f"{name} says {value}") for item, value in values.items()),
            ("local_world_size", reason),
            ("device_type", f"{devices.count} x {devices.type} visible"),
            (
                "backend",
                (
                    "process_group_backend"
                    if request.backend
                    else f"torch's default for {devices.type}"
                ),
            ),
        ),
    )
    if local_world_size == request.processes:
        require_requested(world, request)
    require_devices(world, devices)
    return world


def _local_world_size(plugin: ClusterEnvironment, request: Request) -> tuple[int, str]:
    """Return how many of the plugin's processes are on this node, and what says so.

    Where it has made a process group already, as Ray Train does, the layout is the plugin's, and
    `devices="auto"` or 1 no contradiction; collective then.
    """
    is_one = request.processes * request.nodes == 1
    if is_one and dist.is_initialized() and dist.get_world_size() == plugin.world_size() > 1:
        hosts: list[Any] = [None] * plugin.world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        return hosts.count(socket.gethostname()), "the hosts of the process group's ranks"
    return request.processes, f"Trainer(devices={request.processes})"
