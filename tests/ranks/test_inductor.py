"""`torch.compile` with its default backend, which makes C++ of the blocks: the numbers are those of
one plain process.
"""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine

STEPS, DIM = 3, 16
pytestmark = [
    pytest.mark.skipif(
        not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler"
    ),
    pytest.mark.timeout(600),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(DIM),
            nn.Linear(DIM, 2 * DIM),
            nn.Linear(2 * DIM, DIM),
        )

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def make():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(step, rank):
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


def compiled(rank, world_size, whole):
    """Losses and final values where each block is compiled, or (``whole``) the module around all of
    them.
    """
    model, optimizer = make()
    cpu = torch.device("cpu")
    engine = Zero3Engine(
        model,
        [optimizer],
        device=cpu,
        collectives=make_collectives(dist.group.WORLD, cpu),
        unit_policy=[Block],
    )
    for module in [model] if whole else model:
        module.compile()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with engine.step():
            loss = model(batch(step, rank)).square().mean()
        with engine.backward():
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert torch._dynamo.utils.counters["inductor"], "nothing was compiled"
    return losses, {name: value for unit in engine.units for name, value in unit.values().items()}


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_is_plain(whole):
    model, optimizer = make()
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.cat([batch(step, 0), batch(step, 1)])).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    first, second = run_ranks(compiled, 2, whole, timeout=500)
    torch.testing.assert_close(
        [(a + b) / 2 for a, b in zip(first[0], second[0], strict=True)], losses, rtol=1e-5, atol=0
    )
    for _, values in (first, second):
        for name, p in model.named_parameters():
            torch.testing.assert_close(values[name], p.detach(), rtol=1e-5, atol=1e-6)
