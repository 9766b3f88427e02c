"""The life of the process group around fits, failures and Ctrl-C; and fits in a notebook."""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

from helpers.parity import trainer
from helpers.ranks import free_port, run_ranks
from lightning_zero3.strategies.checkpoints.consolidate import consolidate

ROOT = Path(__file__).resolve().parents[2]


class Model(pl.LightningModule):
    def __init__(self, fail=None):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Linear(3, 1)
        self.fail = fail

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.fail is not None:
            self.fail()
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(8, 3), batch_size=2)


def fail():
    raise ValueError("on purpose")


def fail_on_rank_1():
    if os.environ["LOCAL_RANK"] == "1":
        fail()


def terminate_rank_1():
    if os.environ["LOCAL_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def weight_after_fit(size, **options):
    fitter = trainer("zero3", size, use_distributed_sampler=True)
    module = Model(**options)
    fitter.fit(module)
    with fitter.strategy.gathered():  # users gather and save after a fit
        return module.net.weight.detach().clone()


ORPHANS = """
import os, signal, sys, threading, time
import lightning_zero3
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

class DiesAtStart(lightning_zero3.Zero3Strategy):
    def setup_environment(self):
        print("process", os.getpid(), file=sys.stderr, flush=True)
        if self.local_rank == 0:
            # The process that has started the others is rank 0 itself, or this one's parent.
            time.sleep(3)
            os.kill(os.getpid() if sys.argv[1] == "popen" else int(os.environ["CALLER"]), signal.SIGKILL)
            time.sleep(1000)
        super().setup_environment()

if __name__ == "__main__":
    os.environ["CALLER"] = str(os.getpid())
    strategy = DiesAtStart(start_method=sys.argv[1])
    Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False).fit(BoringModel())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    "start_method", ["popen", pytest.param("forkserver", marks=pytest.mark.variant)]
)
def test_ranks_do_not_wait_for_one_whose_starter_was_killed(tmp_path, start_method):
    script = tmp_path / "script.py"
    script.write_text(ORPHANS)
    output = tmp_path / "output"
    with output.open("w") as stderr:
        main = subprocess.Popen(
            [sys.executable, str(script), start_method], stderr=stderr, stdout=subprocess.DEVNULL
        )
        assert main.wait(60) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while "Rank 1 ends" not in output.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert re.search(r"Rank 1 ends: process \d+, which had started it, is gone", output.read_text())
    for pid in re.findall(r"process (\d+)\n", output.read_text()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)  # rank 0 of forkserver, which sleeps


def fits(rank, size, port):
    dist.destroy_process_group()  # the test's own
    os.environ["MASTER_PORT"] = str(port)
    first = weight_after_fit(size)
    group = dist.group.WORLD
    weights = [weight_after_fit(size)]
    assert dist.group.WORLD is group  # one group for both
    for failure, error in ((fail, ValueError), (interrupt, SystemExit)):
        before = dist.group.WORLD
        with pytest.raises(error):
            weight_after_fit(size, fail=failure)
        assert not dist.is_initialized()  # ended in teardown, on every rank
        weights.append(weight_after_fit(size))
        assert dist.group.WORLD is not before
    assert not torch.equal(first, Model().net.weight)
    return [torch.equal(weight, first) for weight in weights]


def order_the_end():
    """As a process does that reaches the port, and knows what may be known."""
    verdict = json.dumps({"rank": 1, "text": "Rank 1 waits for ever.", "stuck": True})
    store = distributed_c10d._get_default_store()
    for number in range(4):
        store.set("verdict", verdict)
        dist.PrefixStore(f"lightning_zero3/watch/{number}", store).set("verdict", verdict)
    time.sleep(3)


def fit_beside_a_stranger(rank, size):
    return torch.equal(weight_after_fit(size, fail=order_the_end), weight_after_fit(size))


def test_the_watch_takes_no_orders_from_strangers():
    assert run_ranks(fit_beside_a_stranger, 2) == [True, True]


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_lives_from_fit_to_fit_and_ends_with_a_failure(size, capsys):
    port = free_port()
    assert run_ranks(fits, size, port) == [[True] * 3] * size
    assert (
        capsys.readouterr().out.count(
            f"zero3: {size} rank{'s' * (size > 1)} on 1 node, gloo, by torchrun; "
        )
        == 1
    )


def gather_the_module_of_an_earlier_run(rank, size):
    def fitted(rate):
        module = Model()
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=rate)
        fitter = trainer("zero3", size, use_distributed_sampler=True)
        fitter.fit(module)
        return fitter, module

    # each rank's data are the same ones, so 4 batches of them or 2 are equal steps
    def single(
        rate,
    ):
        module = Model()
        optimizer = torch.optim.SGD(module.parameters(), lr=rate)
        for _ in range(4 // size):
            optimizer.zero_grad()
            module.net(torch.ones(2, 3)).square().mean().backward()
            optimizer.step()
        return module.net

    (_, first), (later, second) = fitted(0.1), fitted(0.2)
    with later.strategy.gathered([*first.parameters(), *second.parameters()]):
        for module, rate in ((first, 0.1), (second, 0.2)):
            torch.testing.assert_close(module.net.weight, single(rate).weight)
    with later.strategy.gathered(first, modify=True), torch.no_grad():
        first.net.bias.fill_(7)
    # before a run of its own
    with trainer("zero3", size, use_distributed_sampler=True).strategy.gathered(first):
        assert first.net.bias.item() == 7


@pytest.mark.parametrize("size", [1, 2])
def test_any_strategy_gathers_the_module_of_an_earlier_run(size):
    run_ranks(gather_the_module_of_an_earlier_run, size)


AT_EXIT = """
import atexit, sys
# Before anything else, so it is called after everything else.
atexit.register(lambda: print("at exit:", sys.modules["torch.distributed"].is_initialized()))
import torch.distributed as dist
from tests.trainer.test_process_group import weight_after_fit

weight_after_fit(1)
print("after the fit:", dist.is_initialized())
"""


def test_a_group_ends_when_its_process_does(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(AT_EXIT)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(
        [sys.executable, script],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-2:] == ["after the fit: True", "at exit: False"]
    assert "destroy_process_group() was not called" not in ended.stderr


def fits_in_a_row(rank, size, port):
    dist.destroy_process_group()  # the test's own
    os.environ["MASTER_PORT"] = str(port)
    found = []
    for _ in range(4):
        weight_after_fit(size)
        gc.collect()
        found.append(sorted(filter(None, map(open_file, Path("/proc/self/fd").iterdir()))))
    return found


def open_file(descriptor):
    """What is open there; of sockets nothing: rank 0's server closes its own when it comes to
    that.
    """
    with contextlib.suppress(FileNotFoundError):
        name = re.sub(r"\d+", "", str(descriptor.readlink()))
        return None if name.startswith("socket:") else name


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_fits_leave_no_descriptors():
    for descriptors in run_ranks(fits_in_a_row, 2, free_port()):
        assert descriptors[1:] == descriptors[:1] * 3


NOTEBOOK = """
import os, sys
sys.ps1 = ">>> "  # what an interactive interpreter has
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from tests.trainer.test_process_group import Model, fail, fail_on_rank_1, terminate_rank_1, trainer
import lightning_zero3

try:
    trainer("zero3", 2)
except lightning_zero3.strategies.launch.world.LaunchError as error:
    print(error)
for strategy, devices in (("zero3", 1), ("zero3_notebook", 2)):
    module = Model()
    before = module.net.weight.detach().clone()
    fitter = trainer(strategy, devices)
    fitter.fit(module)
    print(strategy, devices, module.net.weight.tolist(), fitter.strategy.world and fitter.strategy.world.launcher)
print(os.environ.get("MASTER_PORT"))
for failure in (fail_on_rank_1, fail, terminate_rank_1):
    saver, module.fail = OnExceptionCheckpoint(sys.argv[1], failure.__name__), failure  # the module has been trained here
    fitter = trainer("zero3_notebook", 2, enable_checkpointing=None, callbacks=[saver])
    try:
        fitter.fit(module)
    except Exception as error:
        kind, raised = type(error).__name__, "on purpose" in str(error)
        print(failure.__name__, os.path.exists(saver.ckpt_path), kind, raised, saver in fitter.callbacks)
"""


def fits_alone(rank, size):
    module = Model()
    trainer("auto").fit(module)
    return module.net.weight.tolist()


def test_a_notebook_trains_on_one_process_and_on_several(tmp_path):
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", NOTEBOOK, str(tmp_path)]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    refused, *fits = done.stdout.splitlines()
    assert 'Use strategy="zero3_notebook"' in refused
    (alone,) = run_ranks(fits_alone, 1)
    # Ranks that end alike have saved, and nobody waits for the result of processes that have none.
    failures = [
        "fail_on_rank_1 False ProcessRaisedException True True",
        "fail True ProcessRaisedException True True",
        "terminate_rank_1 True ProcessExitedException False True",
    ]
    assert fits == [
        f"zero3 1 {alone} notebook",
        f"zero3_notebook 2 {alone} None",
        "None",
        *failures,
    ]
    steps = []
    # what the ranks have saved: the process that launched them is at step 0
    for name in (
        "fail",
        "terminate_rank_1",
    ):
        consolidate(tmp_path / f"{name}.ckpt", tmp_path / "whole.ckpt")
        steps.append(torch.load(tmp_path / "whole.ckpt", weights_only=False)["global_step"])
    assert steps[0] == 1 and steps[1] >= 1, steps
    assert (
        "Rank 1 raised 'ValueError: on purpose' in forward" in done.stderr
        and "died without" not in done.stderr
    )


SCRIPT = """
import os, sys, time
from pathlib import Path
import lightning.pytorch as pl
from lightning.pytorch.callbacks import OnExceptionCheckpoint
import lightning_zero3
from tests.trainer.test_process_group import Model, trainer

class Slow(Model):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 3:
            Path(f"ready{self.global_rank}").touch()
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

fitter = trainer("zero3", 2, max_epochs=-1, enable_checkpointing=None, callbacks=[OnExceptionCheckpoint(".")])
fitter.fit(Slow())
"""


def left_of(session):
    """Processes of a group that are not gone."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(group) == session and state != "Z":
                found.append(stat.parent.name)
    return found


def test_sigterm_and_ctrl_c_end_all_processes(tmp_path):
    running = {}
    for how in ("SIGTERM", "SIGINT", "torchrun"):
        folder = tmp_path / how
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        command = (
            "-m torch.distributed.run --standalone --nproc-per-node 2 script.py"
            if how == "torchrun"
            else "script.py"
        )
        with open(folder / "log", "w") as log:
            running[how] = subprocess.Popen(
                [sys.executable, *command.split()],
                env=environ,
                cwd=folder,
                start_new_session=True,
                stdout=log,
                stderr=log,
            )
    try:
        for how, process in running.items():
            until = time.monotonic() + 150
            while len(list((tmp_path / how).glob("ready*"))) < 2:
                assert process.poll() is None and time.monotonic() < until, (
                    tmp_path / how / "log"
                ).read_text()
                time.sleep(0.05)
        os.kill(running["SIGTERM"].pid, signal.SIGTERM)  # to the first process alone
        os.killpg(running["SIGINT"].pid, signal.SIGINT)  # what the terminal does
        os.kill(running["torchrun"].pid, signal.SIGTERM)  # what SLURM does; the agent passes it on
        codes = {how: process.wait(150) for how, process in running.items()}
        # as with Lightning's `ddp`
        assert codes["SIGTERM"] == 0 and codes["SIGINT"] == 1 and codes["torchrun"] != 0, codes
        until = time.monotonic() + 90  # the other rank may end after the first
        while (
            any(left_of(process.pid) for process in running.values()) and time.monotonic() < until
        ):
            time.sleep(0.05)
        assert {how: left_of(process.pid) for how, process in running.items()} == {
            how: [] for how in running
        }
        for how in ("SIGTERM", "torchrun"):
            assert (tmp_path / how / "on_exception.ckpt").exists(), (
                tmp_path / how / "log"
            ).read_text()
    finally:
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
