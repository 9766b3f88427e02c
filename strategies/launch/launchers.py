"""What each launcher tells its processes: names of environment variables, and how SLURM writes
lists. Strings only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """A program that starts the processes of a run, by what it leaves in their environment.

    Of each tuple of names the first variable that is set counts; an empty tuple means that the
    launcher does not say.
    """

    name: str
    marks: tuple[str, ...] = ()  # all set: started by this one
    rank: tuple[str, ...] = ()
    world_size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()


TORCHRUN = Launcher(
    "torchrun",
    ("TORCHELASTIC_RUN_ID",),
    ("RANK",),
    ("WORLD_SIZE",),
    ("LOCAL_RANK",),
    ("LOCAL_WORLD_SIZE",),
    ("GROUP_RANK",),
)
OPEN_MPI = Launcher(
    "openmpi",
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
MVAPICH = Launcher(
    "mvapich",
    ("MV2_COMM_WORLD_RANK",),
    ("MV2_COMM_WORLD_RANK",),
    ("MV2_COMM_WORLD_SIZE",),
    ("MV2_COMM_WORLD_LOCAL_RANK",),
    ("MV2_COMM_WORLD_LOCAL_SIZE",),
)
# Hydra, the launcher of Intel MPI and MPICH. `srun --mpi=pmi2` sets PMI_RANK too, but not the local
# ones.
INTEL_MPI = Launcher(
    "intelmpi",
    ("PMI_RANK", "MPI_LOCALRANKID"),
    ("PMI_RANK",),
    ("PMI_SIZE",),
    ("MPI_LOCALRANKID",),
    ("MPI_LOCALNRANKS",),
)
LSF = Launcher(
    "lsf",
    ("LSB_JOBID", "JSM_NAMESPACE_RANK"),
    ("JSM_NAMESPACE_RANK",),
    ("JSM_NAMESPACE_SIZE",),
    ("JSM_NAMESPACE_LOCAL_RANK",),
    ("JSM_NAMESPACE_LOCAL_SIZE",),
)
SLURM = Launcher(
    "slurm",
    ("SLURM_NTASKS",),
    ("SLURM_PROCID",),
    ("SLURM_NTASKS",),
    ("SLURM_LOCALID",),
    node_rank=("SLURM_NODEID",),
)
# The PyTorchJob operator starts one process in each pod and counts pods.
KUBEFLOW = Launcher("kubeflow", rank=("RANK",), world_size=("WORLD_SIZE",), node_rank=("RANK",))
# torch's own variables, set by hand or by a launcher that leaves no name.
VARIABLES = Launcher(
    "variables",
    (),
    ("RANK",),
    ("WORLD_SIZE",),
    ("LOCAL_RANK",),
    ("LOCAL_WORLD_SIZE",),
    ("NODE_RANK", "GROUP_RANK"),
)
# Processes that Lightning starts itself: by the script again, by multiprocessing, or none at all.
SUBPROCESS = Launcher(
    "subprocess", local_rank=("LOCAL_RANK",), node_rank=("NODE_RANK", "GROUP_RANK")
)
SPAWN = Launcher("spawn", local_rank=("LOCAL_RANK",), node_rank=("NODE_RANK",))
NOTEBOOK = Launcher("notebook", local_rank=("LOCAL_RANK",))
SINGLE = Launcher("single")

# The innermost first: torchrun may run inside of mpirun, and mpirun inside of a SLURM job, whose
# variables it inherits.
_BY_MARKS = (TORCHRUN, OPEN_MPI, MVAPICH, INTEL_MPI, LSF)
STARTED_BY_LIGHTNING = (SUBPROCESS, SPAWN, NOTEBOOK, SINGLE)


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """Who started this process; SINGLE when nobody left a trace."""
    for launcher in _BY_MARKS:
        if all(mark in environ for mark in launcher.marks):
            return launcher
    if "SLURM_NTASKS" in environ and not is_interactive_job(environ):
        return SLURM
    if "RANK" in environ:
        in_a_pod = "KUBERNETES_SERVICE_HOST" in environ or "PET_NODE_RANK" in environ
        return KUBEFLOW if in_a_pod and "LOCAL_RANK" not in environ else VARIABLES
    if "LOCAL_RANK" in environ:
        return SUBPROCESS
    return VARIABLES if environ.get("WORLD_SIZE", "1") != "1" else SINGLE


def is_interactive_job(environ: Mapping[str, str]) -> bool:
    """A shell in a SLURM allocation, as Lightning recognises it: its processes are started by
    hand.
    """
    return environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list.

    >>> first_host("a-[003,5-7]-x,b[1-2]")
    'a-003-x'
    >>> first_host("rack[1-2]node[3-4]")
    'rack1node3'
    """
    first = re.match(r"(?:\[[^\]]*\]|[^,\s\[])*", node_list.strip())
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def tasks_on_node(tasks_per_node: str, node: int) -> int | None:
    """Number of tasks on a node, from SLURM's compressed list; None when the list has no such node.

    >>> tasks_on_node("4(x2),3", 2)
    3
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[node] if 0 <= node < len(counts) else None
