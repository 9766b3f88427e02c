"""Starts ranks, lets one fail and writes down what became of all of them."""

import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

from helpers import ranks

LIMIT_S = 60  # no run takes so long; one that does hangs
PAUSE_S = 7  # longer than `lost`
ORPHANS_S = 15  # torch's loader workers look after their rank every five seconds


@dataclass(frozen=True)
class Fault:
    kind: str
    phase: str
    rank: int
    world_size: int


@dataclass
class Outcome:
    # rank -> the last words of its error, "" for none
    said: dict[int, str] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)  # rank -> exit code
    # from the fault to the end of the last process; None if it did not happen
    seconds: float | None = None
    workers: int = 0  # processes that the ranks had started
    orphans: int = 0  # ranks and workers that are left ORPHANS_S after the last rank's end
    hung: bool = False
    resumed: bool = False
    # rank -> the step where each attempt began to train
    begun: dict[int, list[int]] = field(default_factory=dict)
    # largest of any loss after the resume, from the run without a fault
    difference: float | None = None


def run(fault: Fault, timeout: float = LIMIT_S) -> Outcome:
    """Train with ``fault``, then resume without it."""
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    try:
        outcome = attempt(folder, fault, fault.world_size, timeout)
        if outcome.hung:
            return outcome
        again = attempt(folder, None, fault.world_size, timeout)
        outcome.resumed = not again.hung and all(code == 0 for code in again.codes.values())
        outcome.begun = begun(folder)
        outcome.difference = difference(losses(folder), reference(fault.world_size))
        return outcome
    finally:
        shutil.rmtree(folder)


@cache
def reference(world_size: int) -> dict[tuple[int, int], float]:
    """(rank, step) -> loss of the run without a fault."""
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    try:
        outcome = attempt(folder, None, world_size, LIMIT_S)
        assert all(code == 0 for code in outcome.codes.values()), outcome
        return losses(folder)
    finally:
        shutil.rmtree(folder)


def losses(folder: Path) -> dict[tuple[int, int], float]:
    """(rank, step) -> loss, of the last attempt that came there."""
    found = {}
    for file in folder.glob("losses.*"):
        for line in file.read_text().splitlines():
            step, loss = line.split()
            found[int(file.suffix[1:]), int(step)] = float(loss)
    return found


def begun(folder: Path) -> dict[int, list[int]]:
    """Rank -> the step where each attempt began to train; one that did not come so far has none."""
    return {
        int(file.suffix[1:]): list(map(int, file.read_text().split()))
        for file in sorted(folder.glob("begun.*"))
    }


def difference(mine: dict, theirs: dict) -> float | None:
    """Largest absolute difference; None if steps are missing."""
    return (
        max(abs(mine[key] - theirs[key]) for key in theirs)
        if mine.keys() == theirs.keys()
        else None
    )


def attempt(folder: Path, fault: Fault | None, world_size: int, timeout: float) -> Outcome:
    """One run of all ranks."""
    port = ranks.free_port()
    logs = Path(tempfile.mkdtemp(dir=folder, prefix="logs-"))
    with ranks.asking:
        ranks._start_fork_server()
        context = multiprocessing.get_context("forkserver")
        processes = [
            context.Process(
                target=_rank_main, args=(rank, world_size, port, str(folder), str(logs), fault)
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
    if fault is not None and fault.kind == "pause":
        _pause(processes, folder, fault.rank)
    if fault is not None and fault.kind == "wait apart":
        wait_until(
            lambda: any(
                "Nobody has moved" in log.read_text(errors="replace") for log in logs.iterdir()
            )
        )
        (folder / "go on").touch()
    # until somebody wakes or kills it
    frozen = fault.rank if fault is not None and fault.kind == "freeze" else None
    running = [p.sentinel for r, p in enumerate(processes) if r != frozen]
    deadline = time.monotonic() + timeout
    while running and (done := wait(running, max(0.0, deadline - time.monotonic()))):
        running = [sentinel for sentinel in running if sentinel not in done]
    ended = time.time()
    groups = [p.pid for r, p in enumerate(processes) if r != frozen]
    wait_until(lambda: not _in_groups(groups), ORPHANS_S)
    with ranks.asking:
        outcome = Outcome(codes={r: p.exitcode for r, p in enumerate(processes)})
        outcome.hung = bool(running)
        outcome.orphans = _in_groups(groups)
        ranks._kill_groups(processes)
    if (folder / "fault").exists() and fault is not None:
        outcome.seconds = ended - float((folder / "fault").read_text())
    outcome.workers = sum(int(file.read_text()) for file in folder.glob("workers.*"))
    outcome.said = {
        r: _last_words((logs / str(r)).read_text(errors="replace")) for r in range(world_size)
    }
    if os.environ.get("FAULT_LOGS"):
        for r in range(world_size):
            print(f"--- rank {r}\n{(logs / str(r)).read_text(errors='replace')}")
    return outcome


def _pause(processes: list, folder: Path, first: int) -> None:
    """Stop all for a while, as Ctrl-Z and `fg` do, and let one go on before the others."""
    wait_until((folder / "fault").exists)
    for process in processes:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(PAUSE_S)
    os.kill(processes[first].pid, signal.SIGCONT)
    time.sleep(1.5)  # for its thread, which looks once a second, to find nobody's new report
    for process in processes:
        os.kill(process.pid, signal.SIGCONT)
    time.sleep(1.5)
    (folder / "go on").touch()


def wait_until(there: Callable[[], object], timeout: float = LIMIT_S) -> None:
    """Or until it is too late."""
    until = time.monotonic() + timeout
    while not there() and time.monotonic() < until:
        time.sleep(0.1)


def _last_words(log: str) -> str:
    """The message at the end of the traceback, or what was said about another rank before the
    process was ended.
    """
    errors = re.findall(
        # and the line that says what to do
        r"^(?:\[rank\d+\]: )?([\w.]+(?:Error|Failure|Exception|Interrupt)\b.*"
        r"(?:\n(?:\[rank\d+\]: )?All ranks must .*)?)$",
        log,
        re.M,
    )
    ends = re.findall(
        r"^((?:Rank \d+ (?:on|died|raised|has) |(?:In step \d+: )?The ranks ).*"
        r"(?:\nAll ranks must .*)?)$",
        log,
        re.M,
    )
    warnings = re.findall(
        r"((?:Rank \d+ (?:holds|has not reported)|Nobody has moved) .*)$", log, re.M
    )
    return errors[-1] if errors else ends[-1] if ends else " ".join(warnings)


def _in_groups(groups: list[int]) -> int:
    """Live processes of some process groups."""
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        count += int(fields[2]) in groups and fields[0] not in "ZX"
    return count


def _rank_main(rank, world_size, port, folder, logs, fault):
    os.setpgid(0, 0)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="faults",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        **ranks._ONE_THREAD,
    )
    # a background job's processes would ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ranks._redirect_output(Path(logs, str(rank)))
    import torch

    from faults.program import train

    torch.set_num_threads(1)
    train(folder, fault, world_size)
