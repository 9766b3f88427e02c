"""Lightning's cluster environments: check them against our record, fill in one that is missing."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
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

from .detect import locate
from .launchers import (
    INTEL_MPI,
    KUBEFLOW,
    LSF,
    MVAPICH,
    OPEN_MPI,
    PMI,
    SLURM,
    TORCHRUN,
    VARIABLES,
    Launcher,
    find_launcher,
)
from .rendezvous import is_group_of_others
from .world import Devices, LaunchError, Request, World, require_devices, require_requested

_BY_MPI = (OPEN_MPI, MVAPICH, INTEL_MPI, PMI)
# Environments that read the variables that `locate` reads too, whoever has set them. MPIEnvironment
# asks mpi4py instead.
_BY_VARIABLES: dict[type[ClusterEnvironment], Launcher] = {
    KubeflowEnvironment: KUBEFLOW,
    LSFEnvironment: LSF,
    SLURMEnvironment: SLURM,
    TorchElasticEnvironment: TORCHRUN,
}
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

    They are in a process group already, MPI has started them (without ``mpi4py``), or another
    launcher has set torch's variables.
    """

    def __init__(self) -> None:
        self.request = Request()  # from the strategy, which knows the Trainer's options later

    @cached_property
    def _group_places(self) -> dict[str, Any]:
        rank, hosts = dist.get_rank(), [""] * dist.get_world_size()
        dist.all_gather_object(hosts, socket.gethostname())
        same = [r for r, host in enumerate(hosts) if host == hosts[rank]]
        return {
            "rank": rank,
            "local_rank": same.index(rank),
            "node_rank": list(dict.fromkeys(hosts)).index(hosts[rank]),
            "world_size": len(hosts),
            "local_world_size": len(same),
            "main_address": hosts[0],
            "main_port": 0,
        }

    def find(self, devices: Devices, request: Request) -> World:
        """Return this process's record; collective where the process group is asked."""
        if is_group_of_others():
            return _told_by("process group", self._group_places, devices, request)
        return locate(os.environ, devices, request)

    @property
    def _world(self) -> World:
        return self.find(Devices(), self.request)

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
    launcher, kind = find_launcher(os.environ), type(plugin)
    if kind is LightningEnvironment and is_group_of_others():
        return DetectedEnvironment()
    if kind is LightningEnvironment and launcher is KUBEFLOW:
        return KubeflowEnvironment()
    # Lightning's `SLURMEnvironment.detect` takes mpirun in a SLURM job for srun. There the SLURM
    # variables describe mpirun's own helper processes.
    if kind in (LightningEnvironment, SLURMEnvironment) and launcher in _BY_MPI:
        return DetectedEnvironment()
    if kind is LightningEnvironment and launcher is VARIABLES:
        return DetectedEnvironment()
    return plugin


def identify(plugin: ClusterEnvironment, devices: Devices, request: Request) -> World:
    """Return this process's record, after a check that the cluster environment agrees with it.

    Where others have made the process group, collective.

    Raises:
        LaunchError: variables, plugin, Trainer and devices contradict each other.
    """
    if is_group_of_others():
        devices = replace(devices, backend=dist.get_backend())
    owns_layout, kind = False, type(plugin)
    if kind is LightningEnvironment:
        # The user may have chosen it, where Lightning would have taken another, to start processes
        # in spite of a launcher, whose variables then do not count.
        environ = {n: os.environ[n] for n in _LIGHTNING_VARIABLES if n in os.environ}
        world = locate(environ, devices, request)
    elif kind in _BY_VARIABLES:
        world = locate(os.environ, devices, request, _BY_VARIABLES[kind])
    elif isinstance(plugin, DetectedEnvironment):
        world, owns_layout = plugin.find(devices, request), is_group_of_others()
    else:
        world, owns_layout = _ask(plugin, devices, request), True
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
                " Trainer has left, or pass the right environment to Trainer(plugins=...).",
                world,
            )
    require_requested(world, request, owns_layout)
    require_devices(world, devices)
    return world


def _ask(plugin: ClusterEnvironment, devices: Devices, request: Request) -> World:
    """Return what a cluster environment of the user's says of this process."""
    name, why = type(plugin).__name__, {}
    # What the plugin does not know, the ranks' hosts tell if they can talk already, or the Trainer.
    if is_group_of_others():
        places = DetectedEnvironment()._group_places
    else:
        places = {"local_world_size": request.processes}
        why = {"local_world_size": f"devices of the Trainer={request.processes}"}
    places |= {
        "rank": plugin.global_rank(),
        "local_rank": plugin.local_rank(),
        "node_rank": plugin.node_rank(),
        "world_size": plugin.world_size(),
        "main_address": plugin.main_address,
        "main_port": plugin.main_port,
    }
    return _told_by(name, places, devices, request, **why)


def _told_by(
    name: str, places: Mapping[str, Any], devices: Devices, request: Request, **why: str
) -> World:
    told = {item: f"{name}'s {item}={value}" for item, value in places.items()}
    return World(
        name,
        **places,
        device_type=devices.type,
        backend=request.backend or devices.backend,
        why=tuple({**told, **why}.items()),
    )
