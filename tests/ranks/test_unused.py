"""Parameters that some ranks, or all, or some steps do not use are treated as on one device.

There a parameter outside the graph has `grad is None`: no decay, no momentum, no step is counted.
SGD shows a wrong momentum or decay; Adam also a wrong step count, by its bias correction (its large
eps keeps the update a smooth function of the gradient, so that rounding is not amplified).
"""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.models import make
from helpers.parity import assert_tensors_close
from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.branches = nn.ModuleDict({name: nn.Linear(6, 6) for name in "abcd"})
        for name in "abcd":
            self.register_parameter(f"gain_{name}", nn.Parameter(torch.ones(6)))

    def forward(self, x, used, runs):
        x = torch.tanh(self.stem(x))
        for name in runs:
            y = torch.tanh(self.branches[name](x))
            if name in used:
                x = x + y * getattr(self, f"gain_{name}")
        return x.square().mean()


def _alternate(step, micro, rank, world_size):
    return "ab" if (step + rank) % 2 else "cd"


# The branches that the loss of a rank depends on. All branches run on all ranks, except in SAME:
# there the ranks use the same ones, and run only those. One micro-batch a step unless the name says
# otherwise.
SCENARIOS = {
    "nobody": lambda step, micro, rank, world_size: "ab",
    "rank 0 only": lambda step, micro, rank, world_size: "abc" if rank == 0 else "a",
    "last rank only": lambda step, micro, rank, world_size: (
        "dab" if rank == world_size - 1 else "b"
    ),
    "some steps": lambda step, micro, rank, world_size: "abc" if step % 2 else "bd",
    "later steps": lambda step, micro, rank, world_size: "abcd" if step > 1 else "b",
    "one rank in some steps": lambda step, micro, rank, world_size: (
        "acd" if (step, rank) == (1, 0) else "a"
    ),
    "alternate": _alternate,
    "no step at all": lambda step, micro, rank, world_size: "",
    "accumulate: first micro-batch of rank 0": lambda step, micro, rank, world_size: (
        "abd" if (micro, rank) == (0, 0) else "b"
    ),
    "accumulate: second micro-batch of the last": lambda step, micro, rank, world_size: (
        "ca" if (micro, rank) == (1, world_size - 1) else "a"
    ),
    "accumulate: never and sometimes": lambda step, micro, rank, world_size: "abc"[
        : 1 + (step + micro) % 3
    ],
}
SAME = {"nobody", "some steps", "later steps", "no step at all", "accumulate: never and sometimes"}
OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.3, momentum=0.9, weight_decay=0.1),
    "adam": lambda groups: torch.optim.AdamW(groups, lr=0.05, eps=1e-2, weight_decay=0.1),
}
STEPS = 4
RUNS = [("sgd", 2), *(("adam", world_size) for world_size in (1, 2, 3, 4))]


def groups_of(model):
    # The gains stand alone in a group of few elements: some ranks own nothing of it.
    return [
        {"params": [p for n, p in model.named_parameters() if not n.startswith("gain")]},
        {
            "params": [p for n, p in model.named_parameters() if n.startswith("gain")],
            "weight_decay": 0.3,
        },
    ]


def data(step, micro, rank):
    return torch.randn(
        3, 6, generator=torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    )


def loss_of(model, scenario, step, micro, rank, world_size):
    used = SCENARIOS[scenario](step, micro, rank, world_size)
    return model(data(step, micro, rank), used, used if scenario in SAME else "abcd")


def micros(scenario):
    return 2 if scenario.startswith("accumulate") else 1


def alone(scenario, optimizer_name, world_size):
    """All ranks' losses on one device, in plain torch."""
    model = make(Branches)
    optimizer = OPTIMIZERS[optimizer_name](groups_of(model))
    losses = []
    for step in range(STEPS):
        for micro in range(micros(scenario)):
            for rank in range(world_size):
                loss = loss_of(model, scenario, step, micro, rank, world_size)
                losses.append(loss.item())
                (loss / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def together(rank, world_size):
    return {
        (s, o): train(rank, world_size, s, o)
        for s in SCENARIOS
        for o in OPTIMIZERS
        if (o, world_size) in RUNS
    }


def train(rank, world_size, scenario, optimizer_name):
    print(scenario, optimizer_name, flush=True)
    model = make(Branches, seed=rank)
    optimizer = OPTIMIZERS[optimizer_name](groups_of(model))
    cpu = torch.device("cpu")
    engine = Zero3Engine(
        model,
        [optimizer],
        device=cpu,
        collectives=make_collectives(dist.group.WORLD, cpu),
        unit_policy=["Linear"],
    )
    losses = []
    for step in range(STEPS):
        for micro in range(micros(scenario)):
            with engine.step():
                loss = loss_of(model, scenario, step, micro, rank, world_size)
            losses.append(loss.item())
            with engine.backward():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {}
    for unit in engine.units:
        values.update(unit.values())
    return losses, values


@cache
def sharded(world_size):
    return run_ranks(together, world_size, timeout=90)


@pytest.mark.parametrize("optimizer_name, world_size", RUNS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_unused(scenario, optimizer_name, world_size):
    everyone = [runs[scenario, optimizer_name] for runs in sharded(world_size)]
    losses, values = alone(scenario, optimizer_name, world_size)
    mine = [loss for step in zip(*(losses for losses, _ in everyone), strict=True) for loss in step]
    assert max(abs(a - b) / b for a, b in zip(mine, losses, strict=True)) <= 1e-6
    for _, full in everyone:
        assert_tensors_close(full, {name: values[name] for name in full})
        assert full.keys() == values.keys()


def test_the_reference_leaves_unused_parameters_alone():
    start = dict(make(Branches).named_parameters())
    _, end = alone("nobody", "adam", 2)
    same = {name for name, p in start.items() if torch.equal(p, end[name])}
    assert same == {
        "branches.c.weight",
        "branches.c.bias",
        "branches.d.weight",
        "branches.d.bias",
        "gain_c",
        "gain_d",
    }
