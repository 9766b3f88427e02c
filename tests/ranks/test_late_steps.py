"""Optimizers that begin to do something else after some steps, and count the steps of each
parameter by itself.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.parity import assert_tensors_close
from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine

STEPS = 10
BETAS = (0.9, 0.999)


class Branches(nn.Module):
    """One layer that is used in all steps, and one in the first and the last ones."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, step):
        x = torch.tanh(self.always(x))
        return (x if step in (1, 2) else x + self.sometimes(x)).square().mean()


def make():
    torch.manual_seed(0)
    model = Branches()
    # The large eps keeps the update a smooth function of the gradient: rounding is not amplified.
    return model, torch.optim.RAdam(
        model.parameters(), lr=0.05, betas=BETAS, eps=1e-2, weight_decay=0.1
    )


def batch(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank, world_size):
    model, optimizer = make()
    cpu = torch.device("cpu")
    communicators = make_collectives(dist.group.WORLD, cpu)
    engine = Zero3Engine(
        model, [optimizer], device=cpu, collectives=communicators, unit_policy=["Linear"]
    )
    found = []
    for step in range(STEPS):
        with engine.step():
            loss = model(batch(rank, step), step)
        with engine.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(
            {name: value.clone() for unit in engine.units for name, value in unit.values().items()}
        )
    return found


def alone(world_size):
    model, optimizer = make()
    found = []
    for step in range(STEPS):
        for rank in range(world_size):
            (model(batch(rank, step), step) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found, [int(optimizer.state[p]["step"]) for p in model.parameters()]


def is_rectified(step):
    """Whether the variance is taken to be known by then (arXiv 1908.03265, algorithm 2)."""
    most, power = 2 / (1 - BETAS[1]) - 1, math.pow(BETAS[1], step)
    return most - 2 * step * power / (1 - power) > 5


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_radam_takes_both_of_its_branches(world_size):
    expected, steps = alone(world_size)
    assert steps == [STEPS, STEPS, STEPS - 2, STEPS - 2]
    assert [is_rectified(step) for step in (5, STEPS - 2, STEPS)] == [False, True, True]
    for found in run_ranks(train, world_size, timeout=30):
        assert_tensors_close(found, expected)
