"""Training through the communicator of process groups, which NCCL has: right numbers, and ranks that part
are told at the end.

Here it is gloo that carries the collectives, beside a second group for what is agreed on the host,
as with NCCL.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.models import Recipe
from helpers.parity import assert_same_run, assert_same_tensors, fit_here, zero3
from helpers.ranks import run_ranks
from helpers.tracking import on_cuda
from lightning_zero3.strategies.collectives import DivergenceError, GroupCollectives
from lightning_zero3.strategies.engine import Zero3Engine


def make_communicator(*_):
    return GroupCollectives(dist.group.WORLD, dist.new_group(backend="gloo"))


# ---- numbers ---------------------------------------------------------------------------------

EVERYTHING = Recipe(
    tied=True,
    optimizer="adamw",
    decay_matrices=True,
    schedule="step",
    frozen=("blocks.0",),
    steps=6,
)
OPTIONS = {
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.1,
    "max_epochs": 2,
    "limit_val_batches": 2,
}
STRATEGIES = {
    "each micro-batch": {},
    "once a window": {"reduce_once": True},
    "debug": {"debug": True},
}


def fit_all(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_zero3.strategies.zero3.make_collectives", make_communicator)
        recipe = replace(EVERYTHING, seed=rank)  # rank 0's weights count
        runs = {}
        for name, options in STRATEGIES.items():
            strategy = zero3(**options)
            runs[name] = fit_here(recipe, strategy, world_size, OPTIONS)
            assert type(strategy.engine.collectives) is GroupCollectives
        return runs


@cache
def runs(world_size):
    return run_ranks(fit_all, world_size, timeout=100)


@cache
def one_process():
    return fit_here(EVERYTHING, "auto", 1, OPTIONS)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_training_is_that_of_one_process(name, world_size):
    first, *others = (found[name] for found in runs(world_size))
    for other in others:
        assert_same_tensors(other.gradients, first.gradients)
    losses = zip(first.losses, *(other.losses for other in others), strict=True)
    assert_same_run(
        replace(first, losses=[sum(step) / world_size for step in losses]), one_process()
    )


# ---- one rank, over NCCL where there is a GPU --------------------------------------------------


def exchanges_alone(rank, world_size, device):
    group = dist.new_group(backend="nccl") if device == "cuda" else dist.group.WORLD
    communicator, values = (
        GroupCollectives(group, dist.group.WORLD),
        (torch.arange(12.0) / 7).to(device),
    )
    gathered = values.clone()
    communicator.all_gather(gathered.view(torch.uint8)).wait()
    found = {
        "gathered": gathered,
        "summed": communicator.reduce_scatter(values.clone()).wait(),
        "summed in float64": communicator.reduce_scatter(values.double()).wait(),
        "summed, complex": communicator.reduce_scatter(torch.complex(values, -values)).wait(),
        "broadcast": communicator.broadcast(values.clone()),
        "largest": communicator.all_reduce(values.clone(), "max"),
        "agreed": communicator.agree(torch.arange(3)),
    }
    return {name: tensor.cpu() for name, tensor in found.items()}


@pytest.mark.parametrize("device", ["cpu", on_cuda])
def test_exchanges_of_one_rank(device):
    values = torch.arange(12.0) / 7
    expected = dict.fromkeys(["gathered", "summed", "broadcast", "largest"], values) | {
        "summed in float64": values.double(),
        "summed, complex": torch.complex(values, -values),
        "agreed": torch.arange(3),
    }
    (found,) = run_ranks(exchanges_alone, 1, device, timeout=60)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


# ---- ranks that part -------------------------------------------------------------------------

# Units of one size, in orders that lead to as many exchanges of the same kinds: nothing but their
# labels tells them apart.
ORDERS = [[0, 1, 2, 3], [2, 1, 0, 3]]


class Ordered(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, order):
        for k in order:
            x = torch.tanh(self.blocks[k](x))
        return x.square().mean()


def part(rank, world_size):
    torch.manual_seed(0)
    model = Ordered()
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    cpu = torch.device("cpu")
    engine = Zero3Engine(
        model, [optimizer], device=cpu, collectives=make_communicator(), unit_policy=["Linear"]
    )
    order = ORDERS[rank == world_size - 1]
    with engine.step():
        loss = model(torch.ones(2, 8), order)
    with pytest.raises(DivergenceError) as caught, engine.backward():
        loss.backward()
    optimizer.step()  # of one who catches everything and goes on
    values = {name: value.clone() for unit in engine.units for name, value in unit.values().items()}
    assert values.keys() == initial.keys() and all(
        torch.equal(values[name], initial[name]) for name in initial
    )
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_units_in_another_order_are_told_on_every_rank(world_size):
    for message in run_ranks(part, world_size, timeout=30):
        assert (
            f"rank 0 came to unshard unit blocks.0, rank {world_size - 1} to unshard unit blocks.2."
            in message
        )
