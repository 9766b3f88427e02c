"""What a strategy does before the process group, with what it was given; devices are stand-ins."""

from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_zero3 import LaunchError, Zero3Strategy
from lightning_zero3.strategies.launch import process_strategy
from lightning_zero3.strategies.launch.world import Devices

SECOND_OF_TWO = {
    "LOCAL_RANK": "1",
    "NODE_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "77",
}
ELSEWHERE = ("RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")


class Reached(Exception):
    pass


@pytest.fixture
def set_up(monkeypatch):
    """Calls of the host's and of the process group's functions, by a rank of two on a machine with
    some GPUs.
    """
    for name in ELSEWHERE:
        monkeypatch.delenv(name, raising=False)
    for name, value in SECOND_OF_TWO.items():
        monkeypatch.setenv(name, value)
    calls = []

    def start(*args):
        calls.append(args)
        raise Reached

    monkeypatch.setattr(process_strategy, "start_process_group", start)
    # it tells rank 0, which is not there, for half a minute
    monkeypatch.setattr(process_strategy, "refuse", lambda error, timeout: None)

    def run(gpus, **options):
        monkeypatch.setattr(
            process_strategy, "visible_devices", lambda kind: Devices(kind, gpus, "nccl")
        )
        devices = [torch.device("cuda", index) for index in range(2)]
        Zero3Strategy(Mock(), devices, LightningEnvironment(), **options).setup_environment()

    return run, calls


def test_times_and_the_device_reach_those_they_are_for(set_up):
    run, calls = set_up
    timeout, start_timeout = timedelta(seconds=41), timedelta(seconds=43)
    with pytest.raises(Reached):
        run(2, timeout=timeout, start_timeout=start_timeout)
    mine = torch.device("cuda", 1)
    world = calls[-1][0]
    assert (world.rank, world.world_size, world.device_type) == (1, 2, "cuda")
    assert world.backend == "nccl"
    assert calls == [(world, timeout, start_timeout, mine)]


def test_devices_are_counted_before_anything_else(set_up):
    run, calls = set_up
    with pytest.raises(
        LaunchError, match=r"2 processes on this node .*, but this one sees 1 cuda device"
    ):
        run(1)
    assert calls == []
