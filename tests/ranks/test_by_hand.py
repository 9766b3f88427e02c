"""Two steps of a model small enough to compute on paper, with no tolerance.

The model is y = v * (w . x), the loss t * y, so dv = t * (w . x) and dw = t * v * x. SGD with lr
1/2 and momentum 1/2. All numbers are sums of a few powers of two, which floats hold exactly.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine

# x, t of step 1 and step 2; ranks 2 and 3 repeat ranks 0 and 1, which leaves every mean as it is.
DATA = [
    [([1.0, 2.0], 1.0), ([2.0, 0.0], 1.0)],
    [([4.0, -1.0], 2.0), ([0.0, 1.0], 4.0)],
]


def train(rank, world_size):
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        # Rank 0's values count, whatever the others have.
        model[0].weight.copy_(torch.tensor([[1.0, 2.0]]) + rank)
        model[1].weight.fill_(3.0 - rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    cpu = torch.device("cpu")
    group = dist.group.WORLD
    engine = Zero3Engine(
        model,
        [optimizer],
        device=cpu,
        collectives=make_collectives(group, cpu),
        unit_policy=lambda m: [m[0], m[1]],
    )
    assert [unit.name for unit in engine.units] == ["0", "1"]
    seen = []
    for x, t in DATA[rank % 2]:
        optimizer.zero_grad()
        with engine.step():
            loss = t * model(torch.tensor(x)).sum()
        with engine.backward():
            loss.backward()
        full = {}
        for unit in engine.units:
            full.update(unit.gradients())
        optimizer.step()
        values = {}
        for unit in engine.units:
            values.update(unit.values())
        both = [
            full[k].flatten().tolist() + values[k].flatten().tolist()
            for k in ("0.weight", "1.weight")
        ]
        seen.append((loss.item(), *both))
    return seen


@pytest.mark.parametrize("world_size", [2, 4])
def test_two_steps(world_size):
    results = run_ranks(train, world_size, timeout=30)
    # Step 1, w = (1, 2), v = 3.   rank 0: w.x = 5, dw = (3, 6), dv = 5.   rank 1: w.x = 2, dw =
    # (24, -6), dv = 4. Mean: dw = (13.5, 0), dv = 4.5.   w = (1 - 6.75, 2), v = 3 - 2.25.
    first = ([13.5, 0.0, -5.75, 2.0], [4.5, 0.75])
    # Step 2.   rank 0: w.x = -11.5, dw = (1.5, 0), dv = -11.5.   rank 1: w.x = 2, dw = (0, 3), dv =
    # 8. Mean: dw = (0.75, 1.5), dv = -1.75.   Momentum: (6.75 + 0.75, 0 + 1.5) and 2.25 - 1.75.
    second = ([0.75, 1.5, -5.75 - 3.75, 2.0 - 0.75], [-1.75, 0.75 - 0.25])
    losses = [[15.0, -8.625], [12.0, 6.0]]
    for rank, steps in enumerate(results):
        assert [step[0] for step in steps] == losses[rank % 2]
        assert [step[1:] for step in steps] == [first, second]
