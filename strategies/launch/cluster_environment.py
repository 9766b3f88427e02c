"""Lightning's cluster environments: check them against our record, fill in one that is missing."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

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
    def _items(self) -> tuple[Mapping[str, str], Launcher | None]:
        return _group_items() if is_group_of_others() else (dict(os.environ), None)

    @property
    def _world(self) -> World:
        return locate(self._items[0], Devices(), self.request, self._items[1])

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
    environ, launcher = _items(plugin, request)
    if is_group_of_others():
        devices = replace(devices, backend=dist.get_backend())
    world = locate(environ, devices, request, launcher)
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
    owns_layout = launcher is not None and launcher not in _BY_VARIABLES.values()
    require_requested(world, request, owns_layout)
    require_devices(world, devices)
    return world


def _items(
    plugin: ClusterEnvironment, request: Request
) -> tuple[Mapping[str, str], Launcher | None]:
    """Return what says who this process is, and what has started it if the variables need not."""
    if type(plugin) is DetectedEnvironment:
        return plugin._items
    if type(plugin) is LightningEnvironment:
        # The user may have chosen it, where Lightning would have taken another, to start processes
        # in spite of a launcher, whose variables then do not count.
        return {n: os.environ[n] for n in _LIGHTNING_VARIABLES if n in os.environ}, None
    if type(plugin) in _BY_VARIABLES:
        return dict(os.environ), _BY_VARIABLES[type(plugin)]
    name = type(plugin).__name__
    # What the plugin does not know, the ranks' hosts tell if they can talk already, or the Trainer.
    local_world_size = {"devices of the Trainer": str(request.processes)}
    if is_group_of_others() and dist.get_world_size() == plugin.world_size():
        group_items, group = _group_items()
        local_world_size = {n: group_items[n] for n in group.local_world_size}
    return _named(
        name,
        "Trainer(plugins=...)",
        {f"{name}'s rank": str(plugin.global_rank())},
        {f"{name}'s world_size": str(plugin.world_size())},
        {f"{name}'s local_rank": str(plugin.local_rank())},
        local_world_size,
        {f"{name}'s node_rank": str(plugin.node_rank())},
        MASTER_ADDR=plugin.main_address,
        MASTER_PORT=str(plugin.main_port),
    )


def _group_items() -> tuple[Mapping[str, str], Launcher]:
    """Return what the process group that is there says of this process; collective."""
    rank, hosts = dist.get_rank(), [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    same = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    return _named(
        "process group",
        "torch.distributed.is_initialized()",
        {"rank in the process group": str(rank)},
        {"size of the process group": str(len(hosts))},
        {"place among the ranks of this host": str(same.index(rank))},
        {"ranks of this host": str(len(same))},
        {"place among the hosts": str(list(dict.fromkeys(hosts)).index(hosts[rank]))},
        MASTER_ADDR=hosts[0],
        MASTER_PORT="0",
    )


def _named(
    name: str, why: str, *items: Mapping[str, str], **meeting: str
) -> tuple[Mapping[str, str], Launcher]:
    """Return ``items`` as variables, and a launcher that takes its places from them in order."""
    rank, world_size, local_rank, local_world_size, node_rank = map(tuple, items)
    launcher = Launcher(name, (), rank, world_size, local_rank, local_world_size, node_rank, why)
    return {key: value for item in (*items, meeting) for key, value in item.items()}, launcher
