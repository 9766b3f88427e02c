"""Detection of this process's record from environment variables and visible devices alone.

``locate`` reads no file, opens no socket and asks no library, so that every cluster can be tested
by its variables alone. A launcher's own variables count, and what others have left beside them does
not. A launcher's that contradict each other are an error, which names them, their values and the
remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from .launchers import (
    KUBEFLOW,
    LSF,
    NOTEBOOK,
    SINGLE,
    SLURM,
    SPAWN,
    STARTED_BY_LIGHTNING,
    SUBPROCESS,
    Launcher,
    find_launcher,
    first_host,
    shown_variables,
    tasks_on_node,
)
from .world import (
    LOOPBACK,
    Devices,
    LaunchError,
    Request,
    World,
    require_devices,
)

_DEFAULT_PORT = 29500  # torch's
# By launcher: the variable with the number of the job, and how Lightning makes a port of it.
_PORTS_BY_JOB = {SLURM.name: ("SLURM_JOB_ID", 15000, 4), LSF.name: ("LSB_JOBID", 10000, 3)}


def detect(environ: Mapping[str, str], devices: Devices) -> World:
    """Return this process's record, as :func:`locate` does, if the devices allow it.

    Raises:
        LaunchError: variables are missing, or contradict each other or the devices.
    """
    world = locate(environ, devices)
    require_devices(world, devices)
    return world


def locate(
    environ: Mapping[str, str],
    devices: Devices,
    request: Request | None = None,
    launcher: Launcher | None = None,
) -> World:
    """Return this process's record.

    Args:
        environ: variables, the only source beside the arguments.
        devices: the devices that this process sees.
        request: the Trainer's options; None accepts the processes that were started.
        launcher: what has started this process, where its variables need not say so.

    Raises:
        LaunchError: variables are missing, or contradict each other.
    """
    read = _Reader(environ, launcher or _choose_launcher(environ, request))
    launcher = read.launcher
    if launcher in STARTED_BY_LIGHTNING:
        places = _places_by_request(read, request)
    else:
        places = _places_by_launcher(read, request)
    address, port = _meeting_point(read, places)
    read.note("device_type", f"{devices.count} x {devices.type} visible")
    backend = request.backend if request is not None else None
    read.note(
        "backend", "process_group_backend" if backend else f"torch's default for {devices.type}"
    )
    return World(
        launcher.name,
        **places,
        main_address=address,
        main_port=port,
        device_type=devices.type,
        backend=backend or devices.backend,
        why=tuple(read.why.items()),
    )


def _choose_launcher(environ: Mapping[str, str], request: Request | None) -> Launcher:
    """Return the launcher that started this process, or by which Lightning will start others."""
    launcher = find_launcher(environ)
    if request is None or launcher not in STARTED_BY_LIGHTNING:
        return launcher
    if request.start_method == "fork" or (request.interactive and launcher is SINGLE):
        return NOTEBOOK
    if request.start_method != "popen":
        return SPAWN
    return SUBPROCESS if request.processes * request.nodes > 1 else SINGLE


class _Reader:
    """Reads variables and keeps in ``why`` which of them decided which item of the record."""

    def __init__(self, environ: Mapping[str, str], launcher: Launcher) -> None:
        self.environ, self.launcher = environ, launcher
        marks = [f"{mark}={environ[mark]}" for mark in launcher.marks.split() if mark in environ]
        self.why = {"launcher": ", ".join(marks) or "default: no launcher found"}

    def note(self, item: str, reason: str) -> None:
        self.why[item] = reason

    def integer(self, name: str) -> int | None:
        text = self.environ.get(name)
        try:
            return None if text is None else int(text)
        except ValueError:
            raise LaunchError(
                f"{name}={text!r} is not a whole number. Correct or unset {name}."
            ) from None

    def place(self, item: str) -> int | None:
        """Return the value of the first of the launcher's variables for ``item`` that is set."""
        for name in getattr(self.launcher, item).split():
            value = self.integer(name)
            if value is not None:
                self.note(item, f"{name}={value}")
                return value
        return None

    def raise_missing(self, item: str, remedy: str, names: str = "") -> NoReturn:
        raise LaunchError(
            f"This process was started by {self.launcher.name}, but its {item.replace('_', ' ')} is"
            f" unknown: {' or '.join((names or getattr(self.launcher, item)).split())} is not set."
            f" {list_variables(self.environ)} {remedy}"
        )


def list_variables(environ: Mapping[str, str]) -> str:
    """Return a sentence that lists the variables of launchers that are set."""
    listing = ", ".join(f"{name}={value}" for name, value in shown_variables(environ).items())
    return f"Variables set: {listing or 'none'}."


# ---- this process's ranks ------------------------------------------------------------------------


def _places_by_request(read: _Reader, wish: Request | None) -> dict[str, int]:
    """Return the ranks and sizes of a process that Lightning has started, or that starts others.

    ``wish`` None stands for a single process.
    """
    request = wish or Request()
    world_size = request.processes * request.nodes
    _refuse_stray_local_rank(read, world_size)
    local_rank = read.place("local_rank") or 0 if world_size > 1 else 0
    node_rank = read.place("node_rank") or 0 if request.nodes > 1 else 0
    variable = read.integer("WORLD_SIZE")
    if variable not in (None, 1, world_size):
        raise LaunchError(
            f"WORLD_SIZE={variable}, but the Trainer has devices={request.processes} and"
            f" num_nodes={request.nodes}, which makes {world_size} processes. Unset WORLD_SIZE or"
            " change the Trainer."
        )
    reason = (
        f"Trainer(devices={request.processes}, num_nodes={request.nodes})"
        if wish
        else "default: no launcher found"
    )
    read.note("rank", "node_rank * devices + local_rank")
    read.note("world_size", reason)
    read.note("local_world_size", reason)
    for item in ("local_rank", "node_rank"):
        read.why.setdefault(item, "the first")
    return {
        "rank": node_rank * request.processes + local_rank,
        "local_rank": local_rank,
        "node_rank": node_rank,
        "world_size": world_size,
        "local_world_size": request.processes,
    }


def _refuse_stray_local_rank(read: _Reader, world_size: int) -> None:
    """Raise if LOCAL_RANK is set without an address to meet at.

    ``LightningEnvironment.creates_processes_externally`` takes LOCAL_RANK for a launcher's, so
    Lightning would wait for processes that nobody starts.
    """
    if world_size > 1 and read.launcher is SUBPROCESS and "LOCAL_RANK" in read.environ:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in read.environ]
        if missing:
            raise LaunchError(
                f"LOCAL_RANK={read.environ['LOCAL_RANK']} says that a launcher started this"
                f" process, but it has set no {' and no '.join(missing)}: training would wait for"
                f" {world_size - 1} other processes that nobody starts. Unset LOCAL_RANK (some"
                " container images set it), or start with torchrun."
            )


def _places_by_launcher(read: _Reader, request: Request | None) -> dict[str, int]:
    """Return the ranks and sizes of a process that a launcher has started."""
    rank, world_size = read.place("rank"), read.place("world_size")
    if world_size is None:
        read.raise_missing("world_size", "Set it, or unset the rank to run a single process.")
    if rank is None:
        read.raise_missing(
            "rank",
            "Start every process with its rank (torchrun does), or unset the world size to run"
            " one.",
        )
    if read.launcher is SLURM:
        _require_srun(read, rank, world_size)
    node_rank = read.place("node_rank")
    is_one_host = world_size == 1 or read.environ.get("MASTER_ADDR") in LOOPBACK
    local_world_size = _local_world_size(read, world_size, node_rank, is_one_host, request)
    local_rank = read.place("local_rank")
    if local_rank is None and local_world_size in (1, world_size):
        local_rank = rank % local_world_size
        one_or_all = "one process is" if local_world_size == 1 else "all processes are"
        read.note("local_rank", f"{one_or_all} on this node ({read.why['local_world_size']})")
    elif local_rank is None:
        read.raise_missing(
            "local_rank", "Set it to this process's number on its node.", "LOCAL_RANK"
        )
    if node_rank is None:
        node_rank = _node_rank(read, rank, local_rank, local_world_size)
    return {
        "rank": rank,
        "local_rank": local_rank,
        "node_rank": node_rank,
        "world_size": world_size,
        "local_world_size": local_world_size,
    }


def _local_world_size(
    read: _Reader, world_size: int, node: int | None, is_one_host: bool, request: Request | None
) -> int:
    value = read.place("local_world_size")
    if value is not None:
        return value
    if read.launcher is KUBEFLOW:
        read.note("local_world_size", "one process in each pod")
        return 1
    if read.launcher is SLURM:
        names = "SLURM_STEP_TASKS_PER_NODE SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE"
        for name in names.split():
            text = read.environ.get(name, "")
            # A plain number instead of a list is valid for every node.
            tasks = tasks_on_node(text, 0 if text.isdecimal() else node or 0)
            if tasks is not None:
                read.note("local_world_size", f"{name}={text}")
                return tasks
        read.raise_missing("local_world_size", "Pass --ntasks-per-node to srun or sbatch.", names)
    if request is not None and request.processes * request.nodes == world_size:
        read.note("local_world_size", f"Trainer(devices={request.processes})")
        return request.processes
    if is_one_host:
        read.note("local_world_size", "the world size: rank 0 is on this host alone")
        return world_size
    read.raise_missing(
        "local_world_size", "Set it to the number of processes on this node.", "LOCAL_WORLD_SIZE"
    )


def _node_rank(read: _Reader, rank: int, local_rank: int, local_world_size: int) -> int:
    # `World` refuses a node without processes
    node_rank, rest = divmod(rank - local_rank, max(local_world_size, 1))
    if rest:
        raise LaunchError(
            f"{read.why['rank']}, {read.why['local_rank']} and {read.why['local_world_size']} do"
            f" not number the ranks node by node. Start {local_world_size} consecutive ranks on"
            " each node (Open MPI: --map-by slot; Intel MPI: -ppn)."
        )
    read.note("node_rank", "(rank - local_rank) / local_world_size")
    return node_rank


# ---- where the processes meet --------------------------------------------------------------------


def _meeting_point(read: _Reader, places: Mapping[str, int]) -> tuple[str, int]:
    address, port = read.environ.get("MASTER_ADDR"), read.integer("MASTER_PORT")
    if address is not None:
        read.note("main_address", f"MASTER_ADDR={address}")
    else:
        address = _address(read, places)
    if port is not None:
        read.note("main_port", f"MASTER_PORT={port}")
    else:
        port = _port(read)
    return address, port


def _address(read: _Reader, places: Mapping[str, int]) -> str:
    # Lightning's environment for LSF sets MASTER_ADDR to this host, of one node too.
    hosts = read.environ.get("LSB_MCPU_HOSTS", "").split()[::2]
    if read.launcher is LSF and len(hosts) > 1:
        read.note(
            "main_address",
            f"second host of LSB_MCPU_HOSTS={read.environ['LSB_MCPU_HOSTS']} (the first launches)",
        )
        return hosts[1]
    if places["world_size"] == places["local_world_size"]:
        read.note("main_address", "all processes are on this node")
        return LOOPBACK[0]
    if read.launcher is SLURM:
        for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
            if name in read.environ:
                read.note("main_address", f"first host of {name}={read.environ[name]}")
                return first_host(read.environ[name])
    raise LaunchError(
        f"{places['world_size']} processes on several nodes (rank {places['rank']} is number"
        f" {places['local_rank']} of {places['local_world_size']} here,"
        f" {read.why['local_world_size']}) have no place to meet: MASTER_ADDR is not set.\nSet it"
        " to the host of rank 0, and MASTER_PORT to a free port there, alike for all (Open MPI:"
        " mpirun -x MASTER_ADDR)."
    )


def _port(read: _Reader) -> int:
    """Return the port that Lightning's environment for the launcher would choose too."""
    job, base, digits = _PORTS_BY_JOB.get(read.launcher.name, ("", 0, 0))
    number = read.environ.get(job, "")
    if number.isdecimal():
        read.note("main_port", f"{base} + last {digits} digits of {job}={number}")
        return base + int(number[-digits:])
    if read.launcher in STARTED_BY_LIGHTNING:
        read.note("main_port", "any free port")
        return 0
    read.note("main_port", "torch's default")
    return _DEFAULT_PORT


# ---- contradictions ------------------------------------------------------------------------------


def _require_srun(read: _Reader, rank: int, world_size: int) -> None:
    """Raise if a SLURM process was not started by srun, or with unequal numbers of tasks."""
    tasks, nodes = read.integer("SLURM_NTASKS_PER_NODE"), read.integer("SLURM_NNODES")
    if tasks is not None and nodes is not None and tasks * nodes != world_size:
        raise LaunchError(
            f"SLURM_NTASKS={world_size} is not SLURM_NTASKS_PER_NODE={tasks} times"
            f" SLURM_NNODES={nodes}. Give --ntasks-per-node and --nodes, not --ntasks."
        )
    # srun sets the number of its step. A batch script that runs by itself is rank 0, without one.
    if (
        rank == 0
        and world_size > 1
        and "SLURM_STEP_ID" not in read.environ
        and "SLURM_STEPID" not in read.environ
    ):
        raise LaunchError(
            f"SLURM_NTASKS={world_size}, but this process was not started by srun (SLURM_STEP_ID is"
            f" not set): training would wait for {world_size - 1} processes that nobody starts. Put"
            " `srun` in front of the python command, or set SLURM_JOB_NAME=interactive to start"
            " processes by RANK."
        )
