"""How long a device waits for other ranks, by the events around those waits; with stand-ins where
there is no GPU.
"""

import warnings
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers.ranks import run_ranks
from lightning_zero3 import WatchOptions, Zero3Strategy
from lightning_zero3.strategies.collectives import HostClock, make_clock, make_collectives
from lightning_zero3.strategies.engine import Zero3Engine, engine
from lightning_zero3.strategies.engine.streams import Stream
from lightning_zero3.strategies.liveness.device_idle import DeviceWaits, streams_of


class Device(HostClock):
    """Works and waits when told to; `passed` is how far it has come."""

    def __init__(self):
        self.now = 0.0
        self.passed = 0.0

    def mark(self):
        return self.now

    def is_done(self, mark):
        return self.passed >= mark


class SideStream:
    """On `device`, which waits `seconds` for it each time."""

    on_device = True

    def __init__(self, device, seconds):
        self.device, self.seconds = device, seconds

    def fork(self):
        return nullcontext()

    def mark(self):
        return None

    def join(self, mark):
        self.device.now += self.seconds


def test_a_step_is_measured_when_asked_for_and_read_when_the_device_has_passed_it():
    device = Device()
    waits, streams = DeviceWaits(device), [SideStream(device, 1.0), SideStream(device, 2.0)]

    def step():
        waits.begin_step(streams)
        for stream in streams:
            device.now += 0.5
            stream.join(None)

    step()
    assert "join" not in vars(streams[0])  # nobody has asked
    assert waits.read_share() is None
    step()
    assert all("join" in vars(stream) for stream in streams)
    waits.begin_step(streams)
    assert not any("join" in vars(stream) for stream in streams)
    device.passed = device.now - 0.1
    waits.begin_step(streams)
    assert waits.read_share() is None  # the device is still behind
    device.passed = device.now
    waits.begin_step(streams)
    assert waits.read_share() == 1 - 3.0 / 4.0
    assert waits.read_share() is None


def test_what_a_graph_captures_is_not_marked():
    device = Device()
    waits, stream = DeviceWaits(device), SideStream(device, 1.0)
    waits.read_share()
    waits.begin_step([stream])
    mark, device.mark = device.mark, lambda: None
    stream.join(None)
    device.mark = mark
    device.now += 1.0
    waits.begin_step([stream])
    device.passed = device.now
    waits.begin_step([stream])
    assert waits.read_share() == 1.0


def test_a_step_ends_where_a_validation_begins():
    device = Device()
    waits, stream = DeviceWaits(device), SideStream(device, 1.0)
    waits.read_share()
    waits.begin_step([stream])
    device.now += 1.0
    waits.end_step()
    stream.join(None)
    waits.end_step()
    device.passed = device.now
    waits.begin_step([stream])
    assert waits.read_share() == 1.0


def joins_of_a_step(rank, world_size):
    """Waits in a step of a model of three units, of which the slots hold two: seconds of a device
    that waits 1 s each time.
    """
    device, joined = Device(), []

    class CountedLane(SideStream):
        def join(self, mark):
            joined.append(mark)
            super().join(mark)

    engine.Stream = lambda _: CountedLane(device, 1.0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    communicator = make_collectives(torch.distributed.group.WORLD, torch.device("cpu"))
    sharded = Zero3Engine(
        model,
        [optimizer],
        device=torch.device("cpu"),
        collectives=communicator,
        unit_policy=["Linear"],
    )
    waits = DeviceWaits(device)
    found = []
    for _ in range(5):
        waits.read_share()
        waits.begin_step(streams_of(sharded))
        joined.clear()
        started = device.now
        with sharded.step():
            loss = model(torch.ones(2, 4)).sum()
        with sharded.backward():
            loss.backward()
        device.now += 6.0  # its own work
        whole, device.passed = device.now - started, device.now
        found.append((len(joined), whole, waits.read_share()))
        optimizer.step()
    return found


def test_all_places_where_the_engine_waits_for_exchanges_are_marked():
    for found in run_ranks(joins_of_a_step, 2):
        waited, whole, _ = found[0]
        # gathers of five units forward, at least five reductions backward
        assert waited >= 10 and whole == waited + 6
        measured = [share for *_, share in found if share is not None]
        steady, whole, _ = found[1]
        assert measured and measured[-1] == pytest.approx(1 - steady / whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_waits_of_a_gpu_are_measured_and_nothing_waits_for_it():
    device = torch.device("cuda", 0)
    waits, stream = DeviceWaits(make_clock(device)), Stream(device)
    cycles, shares = 50_000_000, []  # some 30 ms
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    for _ in range(9):
        waits.read_share()
        waits.begin_step([stream])
        with stream.fork():
            torch.cuda._sleep(3 * cycles)
            mark = stream.mark()
        torch.cuda._sleep(cycles)
        stream.join(mark)
        assert not torch.cuda.current_stream().query()  # the host is ahead
        torch.cuda.synchronize()
        shares.append(waits.read_share())
    measured = [share for share in shares if share is not None]
    assert len(measured) >= 2 and measured == [pytest.approx(1 / 3, abs=0.05)] * len(measured)
    # In a step whose exchanges are captured there is nothing to mark, and no harm to the capture.
    while "join" not in vars(stream):
        waits.read_share()
        waits.begin_step([stream])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with stream.fork():
            x = torch.ones(4, device=device) + 1
            mark = stream.mark()
        stream.join(mark)
    waits.begin_step([stream])
    graph.replay()
    torch.cuda.synchronize()
    waits.begin_step([stream])
    assert waits.read_share() == 1.0 and x.tolist() == [2.0] * 4


class SlowGpu(pl.LightningModule):
    """Its last rank's GPU takes three times as long for each unit."""

    def __init__(self, slow):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        for layer in self.net:
            layer.register_forward_hook(
                lambda *_: torch.cuda._sleep(20_000_000 * (3 if slow else 1))
            )

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(torch.ones(32, 64), batch_size=1)


def fit_beside_a_slow_gpu(rank, world_size):
    torch.distributed.destroy_process_group()
    strategy = Zero3Strategy(unit_policy=["Linear"], watch=WatchOptions(slow=5))
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = pl.Trainer(
            accelerator="gpu", devices=world_size, strategy=strategy, max_steps=150, **quiet
        )
        trainer.fit(SlowGpu(rank == world_size - 1))
    return [str(w.message) for w in caught if "holds the others up" in str(w.message)]


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_slow_gpu_is_named():
    said, _ = run_ranks(fit_beside_a_slow_gpu, 2, timeout=120)
    assert len(said) == 1 and said[0].startswith(
        "Rank 1 holds the others up: in the last 5 s its GPU worked"
    ), said
