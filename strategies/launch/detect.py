"""Who and where this process is: one frozen record, a pure function of environment variables and
visible devices.

``detect`` reads no file, opens no socket and asks no library, so that every cluster can be tested
by its variables alone. What contradicts itself is an error that names the variables, their values
and the remedy.
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
    TORCHRUN,
    VARIABLES,
    Launcher,
    find_launcher,
    first_host,
    tasks_on_node,
)
from .world import (
    LOOPBACK,
    Devices,
    LaunchError,
    Request,
    World,
    require_devices,
    require_requested,
)

_DEFAULT_PORT = 29500  # torch's


def detect(environ: Mapping[str, str], devices: Devices, request: Request | None = None) -> World:
    """This process's record.

    Args:
        environ: variables; nothing else is looked at.
        devices: what is visible.
        request: the Trainer's wish; without one, what was started is taken as it is.

    Raises:
        LaunchError: variables are missing, contradict each other, the request or the devices.
    """
    launcher = _choose(environ, request)
    read = _Reader(environ, launcher)
    if launcher in STARTED_BY_LIGHTNING:
        places = _places_by_request(read, request)
    else:
        _require_consistent_variables(read)
        places = _places_by_launcher(read, request)
    address, port = _meeting_point(read, places)
    read.note("device_type", f"{devices.count} x {devices.type} visible")
    chosen = request.backend if request is not None else None
    read.note(
        "backend", "process_group_backend" if chosen else f"torch's default for {devices.type}"
    )
    world = World(
        launcher.name,
        **places,
        main_address=address,
        main_port=port,
        device_type=devices.type,
        backend=chosen or devices.backend,
        why=tuple(read.why.items()),
    )
    if request is not None:
        require_requested(world, request)
    require_devices(world, devices)
    return world


def _choose(environ: Mapping[str, str], request: Request | None) -> Launcher:
    launcher = find_launcher(environ)
    if request is None or launcher not in STARTED_BY_LIGHTNING:
        return launcher
    if request.start_method == "fork" or (request.interactive and launcher is SINGLE):
        return NOTEBOOK
    if request.start_method != "popen":
        return SPAWN
    return SUBPROCESS if request.processes * request.nodes > 1 else SINGLE


class _Reader:
    """Reads variables and keeps account of which decided what."""

    def __init__(self, environ: Mapping[str, str], launcher: Launcher) -> None:
        self.environ, self.launcher = environ, launcher
        marks = ", ".join(f"{mark}={environ[mark]}" for mark in launcher.marks)
        self.why = {"launcher": marks or "no launcher's variables"}

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
        """Value of the first variable that the launcher has for ``item``."""
        for name in getattr(self.launcher, item):
            if (value := self.integer(name)) is not None:
                self.note(item, f"{name}={value}")
                return value
        return None

    def missing(self, item: str, remedy: str, names: tuple[str, ...] = ()) -> NoReturn:
        raise LaunchError(
            f"This process was started by {self.launcher.name}, but its {item.replace('_', ' ')} is"
            f" unknown: {' or '.join(names or getattr(self.launcher, item))} is not set."
            f" {told_variables(self.environ)} {remedy}"
        )


def told_variables(environ: Mapping[str, str]) -> str:
    """In words, which variables of launchers are set."""
    starts = (
        "MASTER_",
        "SLURM_N",
        "SLURM_P",
        "SLURM_L",
        "SLURM_STEP_N",
        "OMPI_COMM",
        "MV2_COMM",
        "PMI_",
        "MPI_LOCAL",
        "JSM_",
    )
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
    known = ", ".join(
        f"{k}={environ[k]}" for k in sorted(environ) if k in names or k.startswith(starts)
    )
    return f"Set are: {known or 'nothing'}."


# ---- who am I
# --------------------------------------------------------------------------------------------------


def _places_by_request(read: _Reader, wish: Request | None) -> dict[str, int]:
    """Places of a process that Lightning started, or will."""
    request = wish or Request()
    world_size = request.processes * request.nodes
    _refuse_stray_local_rank(read, world_size)
    local_rank = read.place("local_rank") or 0 if world_size > 1 else 0
    node_rank = read.place("node_rank") or 0 if request.nodes > 1 else 0
    said = read.integer("WORLD_SIZE")
    if said is not None and said != world_size:
        raise LaunchError(
            f"WORLD_SIZE={said}, but the Trainer has devices={request.processes} and"
            f" num_nodes={request.nodes}, which makes {world_size} processes. Unset WORLD_SIZE or"
            " change the Trainer."
        )
    asked = (
        f"Trainer(devices={request.processes}, num_nodes={request.nodes})"
        if wish
        else "one, for want of a launcher"
    )
    read.note("rank", "node_rank * devices + local_rank")
    read.note("world_size", asked)
    read.note("local_world_size", asked)
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
    """A LOCAL_RANK of its own makes Lightning wait for processes that nobody starts."""
    if world_size > 1 and read.launcher is SUBPROCESS and "LOCAL_RANK" in read.environ:
        lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in read.environ]
        if lacking:
            raise LaunchError(
                f"LOCAL_RANK={read.environ['LOCAL_RANK']} says that a launcher started this"
                f" process, but it has set no {' and no '.join(lacking)}: training would wait for"
                f" {world_size - 1} other processes that nobody starts. Unset LOCAL_RANK (some"
                " container images set it), or start with torchrun."
            )


def _places_by_launcher(read: _Reader, request: Request | None) -> dict[str, int]:
    rank, world_size = read.place("rank"), read.place("world_size")
    if world_size is None:
        read.missing("world_size", "Set it, or unset the rank to run a single process.")
    if rank is None:
        read.missing(
            "rank",
            "Start every process with its rank (torchrun does), or unset the world size to run"
            " one.",
        )
    if read.launcher is SLURM:
        _require_srun(read, rank, world_size)
    node_rank = read.place("node_rank")
    on_one_host = world_size == 1 or read.environ.get("MASTER_ADDR") in LOOPBACK
    local_world_size = _local_world_size(read, world_size, node_rank, on_one_host, request)
    local_rank = read.place("local_rank")
    if local_rank is None and read.launcher is KUBEFLOW:
        local_rank = 0
        read.note("local_rank", "one process in each pod")
    elif local_rank is None and on_one_host and read.launcher is VARIABLES:
        # Ranks that meet at the loopback address are all on one host.
        local_rank = rank
        read.note(
            "local_rank",
            f"the rank: MASTER_ADDR={read.environ.get('MASTER_ADDR')} is this host alone",
        )
    elif local_rank is None:
        read.missing("local_rank", "Set it to this process's number on its node.", ("LOCAL_RANK",))
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
    read: _Reader, world_size: int, node: int | None, on_one_host: bool, request: Request | None
) -> int:
    if (value := read.place("local_world_size")) is not None:
        return value
    if read.launcher is KUBEFLOW:
        read.note("local_world_size", "one process in each pod")
        return 1
    if read.launcher is SLURM:
        names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        for name in names:
            text = read.environ.get(name, "")
            # The one without a list is the same for every node.
            found = tasks_on_node(text, 0 if text.isdecimal() else node or 0)
            if found is not None:
                read.note("local_world_size", f"{name}={text}")
                return found
        read.missing("local_world_size", "Pass --ntasks-per-node to srun or sbatch.", names)
    if request is not None and request.processes * request.nodes == world_size:
        read.note("local_world_size", f"Trainer(devices={request.processes})")
        return request.processes
    if on_one_host:
        read.note("local_world_size", "the world size: rank 0 is on this host alone")
        return world_size
    read.missing(
        "local_world_size", "Set it to the number of processes on this node.", ("LOCAL_WORLD_SIZE",)
    )


def _node_rank(read: _Reader, rank: int, local_rank: int, local_world_size: int) -> int:
    if local_world_size < 1:
        raise LaunchError(
            f"{read.why['local_world_size']} is no number of processes. Correct or unset it."
        )
    node_rank, rest = divmod(rank - local_rank, local_world_size)
    if rest:
        raise LaunchError(
            f"{read.why['rank']}, {read.why['local_rank']} and {read.why['local_world_size']} do"
            f" not number the ranks node by node. Start {local_world_size} consecutive ranks on"
            " each node (Open MPI: --map-by slot; Intel MPI: -ppn)."
        )
    read.note("node_rank", "(rank - local_rank) / local_world_size")
    return node_rank


# ---- where do we meet ----------------------------------------------------------------------------


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
    if read.launcher is SLURM:
        for name in ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST"):
            if name in read.environ:
                read.note("main_address", f"first host of {name}={read.environ[name]}")
                return first_host(read.environ[name])
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
    raise LaunchError(
        f"{places['world_size']} processes on several nodes (rank {places['rank']} is number"
        f" {places['local_rank']} of {places['local_world_size']} here,"
        f" {read.why['local_world_size']}) have no place to meet: MASTER_ADDR is not set. Set it to"
        " the host of rank 0, and MASTER_PORT to a free port there, alike for all (Open MPI:"
        " mpirun -x MASTER_ADDR)."
    )


def _port(read: _Reader) -> int:
    """The port that Lightning's environments choose, so that either may be asked."""
    job = {"slurm": "SLURM_JOB_ID", "lsf": "LSB_JOBID"}.get(read.launcher.name, "")
    number = read.environ.get(job, "")
    if read.launcher is SLURM and number.isdecimal():
        read.note("main_port", f"15000 + last four digits of {job}={number}")
        return 15000 + int(number[-4:])
    if read.launcher is LSF and number.isdecimal():
        read.note("main_port", f"10000 + last three digits of {job}={number}")
        return 10000 + int(number) % 1000
    if read.launcher in STARTED_BY_LIGHTNING:
        read.note("main_port", "any free port")
        return 0
    read.note("main_port", "torch's default")
    return _DEFAULT_PORT


# ---- what cannot be ------------------------------------------------------------------------------


def _require_consistent_variables(read: _Reader) -> None:
    """Other launchers' variables may stand there, if they say the same."""
    if read.launcher in (TORCHRUN, VARIABLES, KUBEFLOW):
        return
    for item, name in (
        ("rank", "RANK"),
        ("world_size", "WORLD_SIZE"),
        ("local_rank", "LOCAL_RANK"),
    ):
        said, other = read.place(item), read.integer(name)
        if None not in (said, other) and said != other:
            raise LaunchError(
                f"{name}={other} contradicts {read.why[item]} of {read.launcher.name}. Unset"
                f" {name}, or set it to the same"
                + (
                    ", or SLURM_JOB_NAME=interactive to start processes by RANK."
                    if read.launcher is SLURM
                    else "."
                )
            )


def _require_srun(read: _Reader, rank: int, world_size: int) -> None:
    tasks, nodes = read.integer("SLURM_NTASKS_PER_NODE"), read.integer("SLURM_NNODES")
    if tasks is not None and nodes is not None and tasks * nodes != world_size:
        raise LaunchError(
            f"SLURM_NTASKS={world_size} is not SLURM_NTASKS_PER_NODE={tasks} times"
            f" SLURM_NNODES={nodes}. Give --ntasks-per-node and --nodes, not --ntasks."
        )
    # srun numbers the steps of a job; a batch script by itself is rank 0 of a job without steps.
    if (
        rank == 0
        and world_size > 1
        and "SLURM_STEP_ID" not in read.environ
        and "SLURM_STEPID" not in read.environ
    ):
        raise LaunchError(
            f"SLURM_NTASKS={world_size}, but this process was not started by srun (SLURM_STEP_ID is"
            f" not set): training would wait for {world_size - 1} processes that nobody starts. Put"
            " `srun` in front of the python command."
        )
