"""Whoever looks at a rank that waits for others sees the unit it waits for, not the one before."""

import torch
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine


def seen_by_gathers(rank, world_size):
    """(unit that is gathered, unit that is told) at each gather of two forwards."""
    cpu = torch.device("cpu")
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    communicator = make_collectives(torch.distributed.group.WORLD, cpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Zero3Engine(
        model, [optimizer], device=cpu, collectives=communicator, unit_policy=["Linear"]
    )
    names, found = {unit.labels[0]: unit.index for unit in engine.units}, []
    gather = communicator.all_gather

    def all_gather(buffer, label=0):
        if label in names:
            found.append((names[label], communicator.exchange_log.progress[0]))
        return gather(buffer, label)

    communicator.all_gather = all_gather
    x = torch.full((2, 4), float(rank))
    for _ in range(2):
        found.append("forward")
        with engine.step():
            loss = model(x).sum()
        with engine.backward():
            found.append("backward")
            loss.backward()
    return found


def test_a_gather_for_a_use_is_told_before_it_may_wait():
    for found in run_ranks(seen_by_gathers, 2):
        first = found[1 : found.index("backward")]
        # no order is known yet: nothing is gathered ahead
        assert first == [(unit, unit) for unit in range(5)]
        second = found[found.index("forward", 1) + 1 :]
        ahead = [(unit, told) for unit, told in second[: second.index("backward")] if unit != told]
        assert ahead and all(unit == told + 1 for unit, told in ahead)
