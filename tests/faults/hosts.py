"""Two hosts on one machine: network, process-id and host-name namespaces, joined by a switch, which
is a third one.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from faults.harness import Fault, wait_until

SCRIPT = Path(__file__).with_name("script.py")
PORT = 29400


def _run(command: str) -> subprocess.CompletedProcess:
    return subprocess.run(command.split(), capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator["TwoHosts | str"]:
    """The hosts, or the reason why this machine cannot have them."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        yield "needs the commands ip (iproute2) and unshare (util-linux)"
        return
    tag = uuid.uuid4().hex[:6]
    *names, switch = [f"z3{tag}{letter}" for letter in "abs"]
    try:
        for command in _cabling(names, switch):
            done = _run(command)
            if done.returncode:
                yield f"the kernel or missing rights forbid it: {command}: {done.stderr.strip()}"
                return
        yield TwoHosts(names, switch)
    finally:
        for name in (*names, switch):
            _run(f"ip netns del {name}")  # takes its ends of the cables along


def _cabling(names: list[str], switch: str) -> Iterator[str]:
    for name in (*names, switch):
        yield f"ip netns add {name}"
    yield f"ip -n {switch} link add name bridge type bridge"
    yield f"ip -n {switch} link set bridge up"
    for number, name in enumerate(names, start=1):
        yield f"ip link add {name} netns {name} type veth peer name {name} netns {switch}"
        yield f"ip -n {switch} link set {name} master bridge"
        yield f"ip -n {switch} link set {name} up"
        yield f"ip -n {name} addr add 10.99.0.{number}/24 dev {name}"
        yield f"ip -n {name} link set lo up"
        yield f"ip -n {name} link set {name} up"
    yield f"ip netns exec {names[0]} unshare --uts --pid --fork --mount-proc true"


class TwoHosts:
    def __init__(self, names: list[str], switch: str) -> None:
        self.names, self.switch = names, switch

    def plug(self, is_in: bool) -> None:
        """Put the second host's cable into the switch, or pull it out."""
        _run(f"ip -n {self.switch} link set {self.names[1]} {'up' if is_in else 'down'}")

    def let_through(self, line: str) -> str:
        """Let the switch send to each host what tc's token bucket filter ``line`` lets through.

        Returns why that is not possible, if it is not.
        """
        done = [
            _run(f"tc -n {self.switch} qdisc add dev {name} root tbf {line}") for name in self.names
        ]
        return done[0].stderr.strip()

    def lost(self) -> list[int]:
        """How many packets to each host the switch has dropped."""
        said = [_run(f"tc -n {self.switch} -s qdisc show dev {name}").stdout for name in self.names]
        return [int(re.search(r"dropped (\d+)", text)[1]) for text in said]

    def launch(
        self,
        folder: Path,
        processes: int,
        fault: Fault | None = None,
        max_restarts: int = 0,
        nodes: str = "2",
        timeout: float = 240,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[int], list[str]]:
        """torchrun on both hosts with ``processes`` on each; exit codes and outputs.

        The second host goes down with all that is on it when ``fault`` is "power off".
        ``meanwhile`` is called when the fault has come.
        """
        runs = []
        for number, name in enumerate(self.names, start=1):
            place = Place(number, f"10.99.0.{number}", f"10.99.0.1:{PORT}", name)
            apart = [
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "--uts",
                "--pid",
                "--fork",
                "--mount-proc",
                "--kill-child",
            ]
            named = ["sh", "-c", f'hostname host-{number}; exec "$@"', "sh"]
            runs.append(
                torchrun(
                    place, folder, processes, fault, max_restarts, nodes, within=(*apart, *named)
                )
            )
        try:
            if fault is not None and fault.kind == "power off":
                wait_until((folder / "fault").exists, timeout)
                os.killpg(runs[1].pid, signal.SIGKILL)
            if meanwhile is not None:
                wait_until((folder / "fault").exists, timeout)
                meanwhile()
            codes = [run.wait(timeout) for run in runs]
        finally:
            for run in runs:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)  # with it go all processes of the host
                    run.wait()
        return codes, [(folder / f"log.{number}").read_text(errors="replace") for number in (1, 2)]


def ranks_left(folder: Path) -> int:
    """How many ranks of a run in ``folder`` are there, on both hosts."""
    count = 0
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = file.read_bytes().split(b"\0")
            count += words[1:4] == [b"-u", *(str(word).encode() for word in (SCRIPT, folder))]
    return count


@dataclass(frozen=True)
class Place:
    number: int  # of the node, from 1
    address: str
    meeting_point: str
    interface: str


def torchrun(
    place: Place,
    folder: Path,
    processes: int,
    fault: Fault | None,
    max_restarts: int,
    nodes: str,
    within: Sequence[str] = (),
    patience: str = "",
) -> subprocess.Popen:
    """One node's launcher, in a session of its own; writes to ``log.NUMBER`` in ``folder``."""
    command = "import sys; sys.argv[0] = 'torchrun'; from torch.distributed.run import main; main()"
    arguments = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={processes}",
        f"--max-restarts={max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={place.meeting_point}",
        f"--rdzv-id={folder.name}",
        f"--rdzv-conf=is_host={2 - place.number}{patience}",
        f"--local-addr={place.address}",
        str(SCRIPT),
        str(folder),
        str(processes),
        "2",
        *([fault.kind, fault.phase, str(fault.rank), str(fault.world_size)] if fault else []),
    ]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": place.interface, "OMP_NUM_THREADS": "1"}
    with (folder / f"log.{place.number}").open("w") as log:
        streams = {"stdout": log, "stderr": log, "start_new_session": True}
        return subprocess.Popen(
            [*within, sys.executable, "-c", command, *arguments], env=environ, **streams
        )
