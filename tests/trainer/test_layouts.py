"""Ranks that a process group has already, and a rank that refuses to start."""

import os
import time

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from helpers.parity import assert_tensors_close, trainer
from helpers.ranks import free_port, run_ranks
from lightning_zero3 import LaunchError
from trainer.test_ray import Counts

TORCHRUN = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
)
SOON_S = 15


def set_variables(**variables):
    """Leave of torchrun's variables these alone."""
    for name in TORCHRUN:
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in variables.items()})


class Joined(Counts):
    """One process on the batches of two."""

    def train_dataloader(self):
        return DataLoader(super().train_dataloader().dataset, batch_size=8)


def fit_in_a_group(rank, size, devices, local_rank):
    set_variables(**{"LOCAL_RANK": rank} if local_rank else {})
    runner = trainer("zero3", devices, max_epochs=2, use_distributed_sampler=True)
    runner.fit(module := Counts())
    world = runner.strategy.world
    assert "MASTER_PORT" not in os.environ  # nobody serves there
    trainer("auto", 1, max_epochs=2).fit(alone := Joined())
    assert_tensors_close(dict(module.state_dict()), dict(alone.state_dict()))
    return runner.world_size, world.rank, world.local_rank, world.local_world_size, world.launcher


@pytest.mark.parametrize(
    ("devices", "local_rank"),
    [(1, False), pytest.param(2, True, marks=pytest.mark.variant)],
)
def test_a_process_group_that_is_there_is_asked(devices, local_rank):
    found = run_ranks(fit_in_a_group, 2, devices, local_rank)
    assert found == [(2, rank, rank, 2, "process group") for rank in range(2)]


def ask_for_others_than_the_group_has(rank, size):
    set_variables()
    with pytest.raises(LaunchError) as caught:
        trainer("zero3", 3).fit(Counts())
    return str(caught.value)


def test_a_trainer_that_contradicts_the_process_group_is_an_error():
    (message, _) = run_ranks(ask_for_others_than_the_group_has, 2)
    assert message.startswith(
        "process group started 2 processes (process group's world_size=2), but"
    )
    assert "Use Trainer(devices=2, num_nodes=1)" in message


def refuse(rank, size, port, refusing):
    dist.destroy_process_group()  # the test's own
    set_variables(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    start = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        trainer("zero3", 3 if rank == refusing else 2).fit(Counts())
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("refusing", [1, pytest.param(0, marks=pytest.mark.variant)])
def test_a_rank_that_refuses_tells_the_others(refusing):
    found = run_ranks(refuse, 2, free_port(), refusing)
    own, other = found[refusing][0], found[1 - refusing][0]
    assert own.startswith("variables started 2 processes") and "asks for 3" in own
    assert other.startswith(f"Rank {refusing} (process ") and other.endswith(own), other
    assert max(seconds for _, seconds in found) < SOON_S
