"""A profile of a step names what the engine does, after its units."""

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()


def ranges_of_a_step(rank, world_size):
    """{name: times} of the ranges in a step after the first; and names inside of each other's."""
    model = nn.Sequential(*[Block() for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.device("cpu")
    communicator = make_collectives(torch.distributed.group.WORLD, device)
    engine = Zero3Engine(
        model, [optimizer], device=device, collectives=communicator, unit_policy=["Block"]
    )

    def step():
        with engine.step():
            loss = model(torch.ones(2, 8)).sum()
        with engine.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with torch.profiler.profile() as profile:
        step()
    found = {}
    for event in profile.events():
        if event.name.startswith("zero3::"):
            found[event.name] = found.get(event.name, 0) + 1
    return found


UNSHARDED = {"0": 2, "1": 1, "2": 1}


def test_ranges_are_named_after_phases_and_units():
    for found in run_ranks(ranges_of_a_step, 2):
        assert found == {
            # At the turn from forward to backward the last two units are still in their buffers.
            **{f"zero3::unshard {unit}": times for unit, times in UNSHARDED.items()},
            **{f"zero3::wait {unit}": times for unit, times in UNSHARDED.items()},
            **{f"zero3::reduce {unit}": 1 for unit in "012"},
            **{f"zero3::wait for sums {unit}": 1 for unit in "012"},
            "zero3::agreement": 1,
            "zero3::optimizer begins SGD": 1,
            "zero3::optimizer ends SGD": 1,
        }


def ranges_of_a_run(rank, world_size, folder, kind):
    strategy = zero3(unit_policy=None, checkpoint=CheckpointOptions(kind=kind))
    runner = trainer(strategy, world_size, max_steps=2, use_distributed_sampler=True)
    with torch.profiler.profile() as profile:
        runner.fit(BoringModel())
        runner.save_checkpoint(folder / "a.ckpt")
    names = [event.name for event in profile.events() if event.name.startswith("zero3::")]
    return {name: names.count(name) for name in names if "checkpoint" in name or "batch" in name}


@pytest.mark.parametrize("kind", ["file", "sharded"])
def test_the_loader_and_checkpoints_have_ranges(kind, tmp_path):
    stages = ("prepare", "write", "finish") if kind == "file" else ("prepare", "write")
    for found in run_ranks(ranges_of_a_run, 2, tmp_path, kind):
        assert found.pop("zero3::wait for batch") >= 2
        assert found == {f"zero3::{stage} checkpoint": 1 for stage in stages}
