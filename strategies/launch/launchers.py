"""The environment variables that each launcher sets, and SLURM's lists of hosts: strings only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """A program that starts the processes of a run, and the variables that it sets for them.

    Where there are several, with spaces between, the first that is set counts.
    """

    name: str
    marks: str = ""  # if all are set, this launcher has started the process
    rank: str = ""
    world_size: str = ""
    local_rank: str = ""
    local_world_size: str = ""
    node_rank: str = ""


# What may be shown of the environment: these, and options of libraries by their prefixes. Prefixes
# of launchers would show what users and launchers keep beside them: SLURM_JWT, MASTER_PASSWORD.
SHOWN_VARIABLES = frozenset(
    (
        "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK"
        " GROUP_WORLD_SIZE NODE_RANK ROLE_RANK ROLE_WORLD_SIZE TORCHELASTIC_RUN_ID"
        " TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS LSB_JOBID LSB_HOSTS LSB_MCPU_HOSTS"
        " JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE"
        " OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK"
        " OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_NODE_RANK MV2_COMM_WORLD_RANK"
        " MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE PMI_RANK PMI_SIZE"
        " PMI_LOCAL_RANK PMI_LOCAL_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"
        " SLURM_CPUS_ON_NODE SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE"
        " SLURM_GPUS_PER_NODE SLURM_JOB_ID SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES"
        " SLURM_LAUNCH_NODE_IPADDR SLURM_LOCALID SLURM_NNODES SLURM_NODEID SLURM_NODELIST"
        " SLURM_NPROCS SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_PROCID SLURM_STEP_ID SLURM_STEPID"
        " SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE"
        " SLURM_TASKS_PER_NODE"
    ).split()
)
_SECRET = re.compile("TOKEN|SECRET|KEY|PASS|JWT|COOKIE|CREDENTIAL", re.IGNORECASE)


def shown_variables(environ: Mapping[str, str], prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """Return the variables that may be shown and sent to other ranks, sorted by name.

    Args:
        environ: all variables.
        prefixes: with which options of libraries begin. A name that sounds like a secret's is left
            out all the same.
    """
    return {
        name: environ[name]
        for name in sorted(environ)
        if (name in SHOWN_VARIABLES or name.startswith(prefixes)) and not _SECRET.search(name)
    }


TORCHRUN = Launcher(
    "torchrun",
    "TORCHELASTIC_RUN_ID",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
)
OPEN_MPI = Launcher(
    "openmpi",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MVAPICH = Launcher(
    "mvapich",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
# Hydra, the launcher of Intel MPI and MPICH. `srun --mpi=pmi2` sets PMI_RANK too, but
# neither MPI_LOCALRANKID nor MPI_LOCALNRANKS.
INTEL_MPI = Launcher(
    "intelmpi",
    "PMI_RANK MPI_LOCALRANKID",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
)
# Other programs that speak MPI's PMI: Cray's, and MPICH's gforker, which numbers no local ranks.
PMI = Launcher(
    "pmi",
    "PMI_RANK PMI_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_LOCAL_RANK LOCAL_RANK",
    "PMI_LOCAL_SIZE LOCAL_WORLD_SIZE",
)
LSF = Launcher(
    "lsf",
    "LSB_JOBID JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_SIZE",
)
SLURM = Launcher(
    "slurm",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    node_rank="SLURM_NODEID",
)
# The PyTorchJob operator starts one process in each pod and counts pods.
KUBEFLOW = Launcher("kubeflow", rank="RANK", world_size="WORLD_SIZE", node_rank="RANK")
# torch's own variables, set by hand or by a launcher that does not name itself.
VARIABLES = Launcher(
    "variables",
    "",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK GROUP_RANK",
)
# Processes that Lightning starts itself: it runs the script again, uses multiprocessing, or starts
# none.
SUBPROCESS = Launcher("subprocess", local_rank="LOCAL_RANK", node_rank="NODE_RANK GROUP_RANK")
SPAWN = Launcher("spawn", local_rank="LOCAL_RANK", node_rank="NODE_RANK")
NOTEBOOK = Launcher("notebook", local_rank="LOCAL_RANK")
SINGLE = Launcher("single")

# The innermost first: torchrun may run inside of mpirun, and mpirun inside of a SLURM job, whose
# variables it inherits.
_BY_MARKS = (TORCHRUN, OPEN_MPI, MVAPICH, INTEL_MPI, LSF)
STARTED_BY_LIGHTNING = (SUBPROCESS, SPAWN, NOTEBOOK, SINGLE)


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """Return the launcher that started this process; SINGLE if no launcher's variables are set."""
    for launcher in _BY_MARKS:
        if all(mark in environ for mark in launcher.marks.split()):
            return launcher
    if "SLURM_NTASKS" in environ and not is_interactive_job(environ):
        return SLURM
    if "PMI_RANK" in environ and environ.get("PMI_SIZE", "1") != "1":
        return PMI
    # the only process of a pod or an image starts those of its devices as if it were no launcher's
    is_alone = environ.get("WORLD_SIZE") == "1" and "LOCAL_RANK" not in environ
    if "RANK" in environ and not is_alone:
        is_pod = "KUBERNETES_SERVICE_HOST" in environ or "PET_NODE_RANK" in environ
        return KUBEFLOW if is_pod and "LOCAL_RANK" not in environ else VARIABLES
    if "LOCAL_RANK" in environ:
        return SUBPROCESS
    return VARIABLES if environ.get("WORLD_SIZE", "1") != "1" else SINGLE


def is_interactive_job(environ: Mapping[str, str]) -> bool:
    """Return whether this is a shell in a SLURM allocation, whose user starts processes by hand.

    The names are those that Lightning's ``SLURMEnvironment`` checks.
    """
    return environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM node list.

    >>> first_host("a-[003,5-7]-x,b[1-2]")
    'a-003-x'
    >>> first_host("rack[1-2]node[3-4]")
    'rack1node3'
    """
    first = re.match(r"(?:\[[^\]]*\]|[^,\s\[])*", node_list.strip())
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def tasks_on_node(tasks_per_node: str, node: int) -> int | None:
    """Return the number of tasks on ``node`` from SLURM's compressed list; None if it is not there.

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
