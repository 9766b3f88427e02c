"""Ranks that the Trainer itself started: one dies, has fewer batches or cannot begin, and no
process is left.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from torch.utils.data import DataLoader

from helpers.parity import trainer
from helpers.ranks import run_ranks
from trainer.test_process_group import Model, left_of

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, sys
from trainer.test_launched_faults import Faulty, trainer
import lightning_zero3

if __name__ == "__main__":
    case = sys.argv[1]
    batches = 3 if case == "fewer" and os.environ.get("LOCAL_RANK", "0") == "0" else 6
    strategy = "zero3_spawn" if case == "spawn" else "zero3"
    trainer(strategy, 2, limit_train_batches=batches).fit(Faulty(case in ("kill", "spawn")))
"""


class Faulty(Model):
    """Rank 1 may die in its third step."""

    def __init__(self, dies):
        super().__init__()
        self.dies = dies

    def training_step(self, batch, batch_idx):
        if self.dies and batch_idx == 2 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(torch.ones(12, 3), batch_size=2, num_workers=int(self.dies))


def start(folder, case, **environ):
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    ours = {"PYTHONPATH": f"{ROOT}/tests", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with open(folder / "log", "w") as log:
        return subprocess.Popen(
            [sys.executable, "script.py", case],
            env={**os.environ, **ours, **environ},
            cwd=folder,
            start_new_session=True,
            stdout=log,
            stderr=log,
        )


def test_scripts_that_the_trainer_starts_end_together(tmp_path):
    running = {}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        try:
            port = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
            for case, environ in {"kill": {}, "spawn": {}, "fewer": {}, "port": port}.items():
                running[case] = start(tmp_path / case, case, **environ)
            codes = {case: process.wait(100) for case, process in running.items()}
            until = time.monotonic() + 30  # workers look after their loader every five seconds
            while (
                any(left_of(process.pid) for process in running.values())
                and time.monotonic() < until
            ):
                time.sleep(0.05)
            left = {case: left_of(process.pid) for case, process in running.items()}
        finally:
            for process in running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    said = {case: (tmp_path / case / "log").read_text() for case in running}
    assert left == dict.fromkeys(running, []), said
    assert 0 not in codes.values(), (codes, said)
    for case in ("kill", "spawn"):
        assert "Rank 1 died without a word" in said[case] and "in forward" in said[case], said[case]
    # rank 0 is the process whose code counts
    for rank, there in enumerate(["end its training", "unshard unit"]):
        assert f"DivergenceError: In step {[2, 3][rank]}: The ranks run" in said["fewer"], said[
            "fewer"
        ]
        assert f"rank {rank} is about to {there}" in said["fewer"], said["fewer"]
    assert f"Port {port['MASTER_PORT']} " in said["port"] and "is in use" in said["port"], said[
        "port"
    ]


class Endless(Model):
    """Says that it trains."""

    def training_step(self, batch, batch_idx):
        Path(f"ready{self.global_rank}").touch()
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)


def interrupt_when_all_train():
    until = time.monotonic() + 60
    while len(list(Path().glob("ready*"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)  # to the process that called `fit` alone


def fork_from_here(rank, size, folder):
    dist.destroy_process_group()  # the test's own
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "TORCHELASTIC_RUN_ID",
    ):
        os.environ.pop(name, None)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    codes = []
    # rank 1's end, or what rank 0 says of it: whichever is seen first
    died = (
        ProcessExitedException,
        ProcessRaisedException,
    )
    for module, error, options in (
        (Faulty(True), died, {}),
        (Endless(), SystemExit, {"max_epochs": -1}),
    ):
        fitter = trainer("zero3_notebook", 2, **options)
        if isinstance(module, Endless):
            threading.Thread(target=interrupt_when_all_train).start()
        with pytest.raises(error):
            fitter.fit(module)
        for process in fitter.strategy.launcher.procs:
            process.join(30)
        codes.append([process.exitcode for process in fitter.strategy.launcher.procs])
    return codes


def test_forks_end_with_each_other_and_with_the_process_that_forked_them(tmp_path):
    ((killed, interrupted),) = run_ranks(fork_from_here, 1, str(tmp_path), timeout=100)
    assert killed == [1, -signal.SIGKILL]
    assert interrupted == [1, 1]
