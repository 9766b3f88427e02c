"""Run a function on several processes, as the ranks of one gloo process group.

    def total(rank, world_size):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        return x

    def test_total():
        assert run_ranks(total, 2) == [torch.tensor([1.0])] * 2

Ranks are forked from a server process that has imported torch and Lightning once, so that a call
costs milliseconds instead of seconds. Each rank leads a process group of its own, which is killed
on failure, on time-out, at the end, and when the process that called `run_ranks` dies.
"""

import faulthandler
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

# Fork after import is what makes ranks cheap. macOS frameworks do not survive it.
_START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"
# pytest is here because each child imports its parent's main module, `pytest` when that is run
# by its own command.
_PRELOAD = ["torch", "torch.distributed", "lightning.pytorch", "lightning_zero3", "pytest"]
# Threads do not survive a fork, so the server must not start any: these keep OpenBLAS (in numpy)
# and OpenMP to the calling thread. They also keep the ranks from fighting over few cores.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# A hung rank writes its stack at the deadline; this long after it the parent reads the stacks.
_STACK_GRACE_S = 1.0
# Two threads must not ask for the end of one process at a time, and a start asks for the ends of
# all.
asking = threading.RLock()
# After a first failure: how long to wait for ranks that die because of it, to see who was first.
_SETTLE_S = 0.3
_LOG_TAIL_CHARS = 4000


@dataclass(frozen=True)
class _Job:
    """What a rank is told, before its modules can be imported (so: strings and bytes)."""

    rank: int
    world_size: int
    folder: Path
    module: str
    module_file: str
    function: str
    args: bytes
    environ: dict[str, str]
    timeout_s: float

    def path(self, kind: str) -> Path:
        return self.folder / f"{kind}.{self.rank}"


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank; return the results in rank order.

    `fn` must stand at the top level of its module; arguments and results are pickled. The rank's
    environment is the caller's plus the variables torchrun would set, so a Trainer in `fn` takes
    the process for a launched one. A failure raises an `AssertionError` with the traceback of the
    rank that failed first; after `timeout` seconds it shows every rank's Python stack instead.
    """
    _check_reachable(fn)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        with asking:  # a start changes the environment for a moment
            jobs = [
                _make_job(fn, rank, world_size, args, Path(folder), timeout)
                for rank in range(world_size)
            ]
        alive_reader, alive_writer = multiprocessing.Pipe(duplex=False)
        processes: list[Any] = []
        try:
            with asking:
                _start(jobs, alive_reader, processes)
            _wait_for_all(fn, jobs, processes, timeout)
        finally:
            _kill_groups(processes)
            alive_reader.close()
            alive_writer.close()
            _forward_output(jobs)
        return [pickle.loads(job.path("result").read_bytes()) for job in jobs]


def meet_only_where_nobody_else_can() -> None:
    """From here on, in this process: fail where another program could take the port that ranks are
    about to meet at.
    """
    from lightning_zero3.strategies.launch import process_strategy

    start = process_strategy.start_process_group

    def start_group(world: Any, *rest: Any) -> None:
        if world.world_size > 1:
            with suppress(OSError), socket.create_server(("", world.main_port)):
                raise AssertionError(f"port {world.main_port} is free for everybody")
        start(world, *rest)

    process_strategy.start_process_group = start_group


# Below those that connections are given (`ip_local_port_range`): one of them could take a port
# before it is listened on.
_ports = itertools.cycle(range(20_000, 32_000))
for _ in range(os.getpid() % 12_000):  # another pytest begins elsewhere
    next(_ports)


def free_port() -> int:
    """A port of this machine that nobody listens on, and that no other call has returned."""
    for port in _ports:
        with socket.socket() as free, suppress(OSError):
            free.bind(("", port))
            return port
    raise AssertionError


# ---- in the calling process ------------------------------------------------------------------


def _check_reachable(fn: Callable[..., Any]) -> None:
    if "." in fn.__qualname__ or fn.__name__ == "<lambda>" or fn.__module__ == "__main__":
        raise ValueError(
            f"run_ranks needs a function at the top level of an imported module, because each"
            f" rank imports it by name; got {fn.__module__}.{fn.__qualname__}."
        )


def _make_job(
    fn: Callable[..., Any], rank: int, world_size: int, args: tuple, folder: Path, timeout: float
) -> _Job:
    module_file = sys.modules[fn.__module__].__file__
    assert module_file is not None
    launched_as = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
        "TORCHELASTIC_RUN_ID": "run_ranks",
        # Never connected to: the process group exists before anyone could ask for it.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        # Without it gloo looks the host's own name up, which fails on machines without network.
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }
    return _Job(
        rank=rank,
        world_size=world_size,
        folder=folder,
        module=fn.__module__,
        module_file=module_file,
        function=fn.__name__,
        args=pickle.dumps(args),
        # Passed along because a rank would inherit the server's environment, which is older.
        environ={**os.environ, **_ONE_THREAD, **{k: str(v) for k, v in launched_as.items()}},
        timeout_s=timeout,
    )


def _start(jobs: list[_Job], alive_reader: Connection, processes: list[Any]) -> None:
    context = multiprocessing.get_context(_START_METHOD)
    if _START_METHOD == "forkserver":
        _start_fork_server()
    for job in jobs:
        process = context.Process(target=_rank_main, args=(job, alive_reader), daemon=False)
        process.start()
        processes.append(process)


def _start_fork_server() -> None:
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    saved = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _wait_for_all(
    fn: Callable[..., Any], jobs: list[_Job], processes: list[Any], timeout: float
) -> None:
    deadline = time.monotonic() + timeout + _STACK_GRACE_S
    running = {process.sentinel: process for process in processes}
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            with asking:
                raise AssertionError(_describe_timeout(fn, jobs, processes, timeout))
        with asking:
            failed = any([running.pop(sentinel).exitcode != 0 for sentinel in ended])
        if failed:
            # Ranks that fail as a consequence have done so, or never will, a moment from now.
            settled = time.monotonic() + _SETTLE_S
            while running and (late := wait(list(running), max(0.0, settled - time.monotonic()))):
                for sentinel in late:
                    del running[sentinel]
            with asking:
                raise AssertionError(_describe_failure(fn, jobs, processes))


def _describe_failure(fn: Callable[..., Any], jobs: list[_Job], processes: list[Any]) -> str:
    """Name the rank that failed first.

    A rank that raised wrote the time beside its traceback. One that died without a word (a signal,
    `os._exit`) comes before these: an exception elsewhere cannot have killed it, while its death
    is what breaks the others' connections.
    """
    silent, raised = [], []
    for job, process in zip(jobs, processes, strict=True):
        if job.path("error").exists():
            failed_at_ns, text = pickle.loads(job.path("error").read_bytes())
            raised.append((failed_at_ns, job, text))
        elif process.exitcode not in (0, None):
            silent.append((job, f"It died with exit code {process.exitcode} (negative: a signal)."))
    first, text = silent[0] if silent else min(raised, key=lambda entry: entry[0])[1:]
    others = sorted({job.rank for job, _ in silent} | {job.rank for _, job, _ in raised})
    others.remove(first.rank)
    lines = [f"{fn.__qualname__}: rank {first.rank} of {first.world_size} failed first.", text]
    if others:
        lines.append(f"Ranks that failed after it: {others}.")
    if log := _read_log(first):
        lines.append(f"Output of rank {first.rank}:\n{log}")
    return "\n".join(lines)


def _describe_timeout(
    fn: Callable[..., Any], jobs: list[_Job], processes: list[Any], timeout: float
) -> str:
    lines = [f"{fn.__qualname__}: not finished after {timeout} s on {len(jobs)} ranks."]
    for job, process in zip(jobs, processes, strict=True):
        if process.exitcode == 0:
            lines.append(f"--- rank {job.rank}: finished")
            continue
        stack = job.path("stack").read_text() if job.path("stack").exists() else ""
        lines.append(f"--- rank {job.rank}: {stack or 'no stack (it never got as far as fn)'}")
        if log := _read_log(job):
            lines.append(f"Output of rank {job.rank}:\n{log}")
    return "\n".join(lines)


def _read_log(job: _Job) -> str:
    if not job.path("log").exists():
        return ""
    return job.path("log").read_text(errors="replace")[-_LOG_TAIL_CHARS:]


def _forward_output(jobs: list[_Job]) -> None:
    """Print what the ranks printed, rank by rank, so that pytest captures it with the test."""
    for job in jobs:
        if log := _read_log(job):
            print(f"--- output of rank {job.rank}\n{log}")


def _kill_groups(processes: list[Any]) -> None:
    """Kill each rank and whatever it started. The group may live on after its leader."""
    with asking:
        for process in processes:
            for kill in (os.killpg, os.kill):
                # kill: the rank may not have become a group leader yet.
                if kill is os.killpg or process.is_alive():
                    with suppress(ProcessLookupError):
                        kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.join()
            process.close()


# ---- in the ranks ----------------------------------------------------------------------------


def _rank_main(job: _Job, alive_reader: Connection) -> None:
    os.setpgid(0, 0)
    _share_fork_server()
    threading.Thread(target=_die_with_parent, args=(alive_reader,), daemon=True).start()
    os.environ.clear()
    os.environ.update(job.environ)
    _redirect_output(job.path("log"))
    # Kept open and referenced: faulthandler writes to the descriptor from a thread of its own.
    stack_file = job.path("stack").open("w")
    faulthandler.dump_traceback_later(job.timeout_s, file=stack_file)
    try:
        result = _call(job)
    except BaseException:
        failed_at_ns = time.monotonic_ns()  # one clock for all processes of a machine
        _write(job.path("error"), (failed_at_ns, traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: clean-up of a broken process group can wait for peers for ever.
        os._exit(1)
    _write(job.path("result"), result)


def _share_fork_server() -> None:
    """Let loaders' workers come from the server that this rank came from, whose address it knows.

    By itself it would start a server of its own, which imports torch for seconds.
    """
    server = forkserver._forkserver
    # no key before 3.14
    if getattr(server, "_forkserver_address", None) and getattr(
        server, "_forkserver_authkey", True
    ):
        server.ensure_running = resource_tracker.ensure_running


def _die_with_parent(alive_reader: Connection) -> None:
    """Wait for the end of the pipe whose writing end only the calling process holds."""
    with suppress(EOFError):
        alive_reader.recv_bytes()
    os.killpg(0, signal.SIGKILL)


def _redirect_output(path: Path) -> None:
    """Send output, that of native code included, to a file instead of the server's old streams."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)


def _call(job: _Job) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(job.folder / "store"), job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        # Longer than ours: everybody's stack says more than one rank's connection error.
        timeout=timedelta(seconds=2 * job.timeout_s + 60),
    )
    fn = getattr(_load_module(job.module, job.module_file), job.function)
    result = fn(job.rank, job.world_size, *pickle.loads(job.args))
    pickle.dumps(result)  # an unpicklable result is this rank's failure, with its traceback
    if dist.is_initialized():  # fn may have torn it down
        # Nobody hangs up on a peer that still reads; also finds ranks out of step.
        dist.barrier()
        dist.destroy_process_group()
    return result


def _load_module(name: str, file: str) -> ModuleType:
    """Import by name where that works; else the way pytest's importlib mode does, by file."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module was found; something that it imports was not
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: its own classes are pickled by this name
    spec.loader.exec_module(module)
    return module


def _write(path: Path, value: Any) -> None:
    """Write whole or not at all: the parent may kill this process at any moment."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)
