"""`StepTimer`: each part gets its own time, from events that are never waited for."""

import time
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.utils.data import DataLoader

import lightning_zero3  # noqa: F401  (registers the strategy)
from helpers.parity import trainer
from helpers.ranks import run_ranks
from helpers.tracking import Collecting, needs_cuda
from lightning_zero3.callbacks import StepTimer
from lightning_zero3.callbacks.timing.clocks import HostClock
from lightning_zero3.callbacks.timing.communication import Communication, _starters
from lightning_zero3.callbacks.timing.step_timer import KEYS
from lightning_zero3.strategies.collectives import ComparedCollectives, LocalCollectives


class Slept(HostClock):
    """Passes the time that was slept on purpose, and no other: a busy machine is late."""

    now = 0.0

    def mark(self):
        return self.now


def sleep(seconds):
    time.sleep(seconds)
    Slept.now += seconds


class Slow(LightningModule):
    """Sleeps a known time in every part."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        sleep(0.02)
        return self.layer(batch).sum()

    def backward(self, loss):
        sleep(0.04)
        super().backward(loss)

    def on_before_optimizer_step(self, optimizer):
        sleep(0.01)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SlowData(torch.utils.data.Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        sleep(0.03)
        return torch.ones(4)


def fit(timer, tmp_path, model=None, **options):
    logger = Collecting()
    options = {"max_steps": 4, "default_root_dir": tmp_path, **options}
    fitter = trainer(logger=logger, log_every_n_steps=2, callbacks=[timer], **options)
    fitter.fit(model or Slow(), DataLoader(SlowData(), batch_size=1))
    return [(step, row) for step, row in logger.rows if "time/step_ms" in row]


def test_every_part_gets_its_time(tmp_path):
    timer = StepTimer()
    timer.make_clock = lambda device: Slept()
    rows = fit(timer, tmp_path)
    assert [step for step, _ in rows] == [2, 4]
    for _, row in rows:
        assert set(row) == set(KEYS) - {"time/communication_ms"}
        for part, slept in (
            ("data", 30),
            ("forward", 20),
            ("backward", 40),
            ("optimizer", 10),
            ("other", 0),
            ("step", 100),
        ):
            assert row[f"time/{part}_ms"] == pytest.approx(slept, abs=1e-6), part


@pytest.mark.parametrize("has_logger", [True, False])
def test_without_a_logger_a_table_is_printed(has_logger, tmp_path, capsys):
    timer = StepTimer()
    timer.make_clock = lambda device: Slept()
    logger = Collecting() if has_logger else False
    fitter = trainer(logger=logger, callbacks=[timer], max_steps=3, default_root_dir=tmp_path)
    fitter.fit(Slow(), DataLoader(SlowData(), batch_size=1))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    expected = [("step", 100), ("data", 30), ("forward", 20), ("backward", 40)]
    expected += [("optimizer", 10), ("other", 0)]
    rows = [[part, f"{slept:.2f}", "ms"] for part, slept in expected]
    assert [row for row in printed if row[1:] and row[-1] == "ms"] == ([] if has_logger else rows)
    assert (["StepTimer:", "mean", "of", "3", "steps"] in printed) != has_logger


class Delayed(HostClock):
    """A device that reaches a mark only `behind` marks after it was recorded; between two marks
    lies a second.
    """

    def __init__(self, behind):
        self.now = 0.0
        self.behind = behind

    def mark(self):
        self.now += 1.0
        return self.now

    def is_done(self, mark):
        return mark <= self.now - self.behind


def test_steps_that_the_device_has_not_finished_count_later(tmp_path):
    clock = Delayed(behind=7)
    timer = StepTimer()
    timer.make_clock = lambda device: clock
    rows = fit(timer, tmp_path, max_steps=6)
    # Five marks a step. At each logging step the last two steps are not finished; the mean is over
    # whole steps.
    assert [step for step, _ in rows] == [4, 6]
    times = [
        [row[f"time/{part}_ms"] for part in ("data", "forward", "backward", "optimizer", "other")]
        for _, row in rows
    ]
    # nothing other came before the first step
    assert times == [
        [1000.0] * 4 + [500.0],
        [1000.0] * 5,
    ]
    assert [row["time/step_ms"] for _, row in rows] == [4500.0, 5000.0]


class Slowed(ComparedCollectives):
    """Each gather takes 5 ms to start and each reduction 3 ms to wait for, at least."""

    calls = 0

    def all_gather(self, buffer, label=0):
        type(self).calls += 1
        time.sleep(0.005)
        return super().all_gather(buffer, label)

    def reduce_scatter(self, buffer, label=0):
        type(self).calls += 1
        pending = super().reduce_scatter(buffer, label)
        wait = pending.wait
        pending.wait = lambda: (time.sleep(0.003), wait())[1]
        return pending


def communication_case(rank, world_size, folder):
    from lightning_zero3.strategies.communicators import factory

    factory.SharedMemoryCollectives.open = Slowed
    rows = fit(StepTimer(), folder, strategy="zero3", devices=world_size)
    return rows, Slowed.calls


def test_zero3_tells_its_communication(tmp_path):
    (rows, calls), _ = run_ranks(communication_case, 2, tmp_path)
    assert calls >= 2 * 4
    for _, row in rows:
        # One unit: a gather and a reduction each step.
        assert 8 <= row["time/communication_ms"] < row["time/step_ms"]
        assert row["time/communication_ms/min"] >= 8


class Sharded(Slow):
    def configure_model(self):
        fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])


def fsdp2_case(rank, world_size, folder):
    """FSDP2 with collectives of its own that take 5 ms and 3 ms longer."""
    kinds = {}
    for kind, pause in ((DefaultAllGather, 0.005), (DefaultReduceScatter, 0.003)):

        def call(self, *args, inner=kind.__call__, pause=pause, **options):
            kinds[type(self).__base__] = True
            time.sleep(pause)
            return inner(self, *args, **options)

        kind.__call__ = call
    strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    rows = fit(
        StepTimer(), folder, strategy=strategy, devices=world_size, model=(model := Sharded())
    )
    # as they were
    assert {type(starter) for starter in _starters(model)} == {
        DefaultAllGather,
        DefaultReduceScatter,
    }
    return rows, {kind.__name__ for kind in kinds}


def test_collectives_of_fsdp2_are_timed(tmp_path):
    (rows, kinds), _ = run_ranks(fsdp2_case, 2, tmp_path)
    assert kinds == {"DefaultAllGather", "DefaultReduceScatter"}
    for _, row in rows:
        # One layer: a gather, which its backward still has or repeats, and a reduction.
        assert 5 + 3 <= row["time/communication_ms"] < row["time/step_ms"]


def test_wrong_argument():
    with pytest.raises(ValueError, match="every_n_steps.*at least 1"):
        StepTimer(every_n_steps=0)


@needs_cuda
@pytest.mark.gpu
def test_events_on_the_gpu_without_waiting(tmp_path):
    rows = fit(StepTimer(), tmp_path, accelerator="gpu", devices=1, max_steps=8)
    assert all(row["time/forward_ms"] > 0 for _, row in rows[1:])


@needs_cuda
@pytest.mark.gpu
def test_collectives_on_the_gpu_are_timed_by_events():
    """A "gather" that multiplies matrices: its time by events is its time by a clock around a
    synchronisation.
    """

    class Multiplying(LocalCollectives):
        def all_gather(self, buffer, label=0):
            for _ in range(20):
                torch.mm(buffer, buffer)
            return super().all_gather(buffer, label)

    communicator, buffer = Multiplying(), torch.ones(4096, 4096, device="cuda")
    communicator.all_gather(buffer)
    torch.cuda.synchronize()
    timer = Communication(
        SimpleNamespace(collectives=communicator), torch.nn.Identity(), buffer.device
    )
    begun = time.perf_counter()
    communicator.all_gather(buffer)
    assert timer.seconds() == 0.0  # asking does not wait
    torch.cuda.synchronize()
    assert timer.seconds() == pytest.approx(time.perf_counter() - begun, rel=0.2)
