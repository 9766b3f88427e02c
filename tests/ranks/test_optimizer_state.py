"""Optimizer state that comes back from a checkpoint, or was made with the optimizer, has the dtypes
that it had.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine
from lightning_zero3.strategies.state_dicts.gather import gather_on_rank_zero
from lightning_zero3.strategies.state_dicts.optimizer_state import (
    load_optimizer_state,
    sliced_optimizer_state,
)


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.bfloat16)

    def forward(self, x):
        return self.narrow(self.wide(x).bfloat16()).float().square().mean()


def _engine():
    torch.manual_seed(0)
    model = Mixed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    device = torch.device("cpu")
    group = dist.group.WORLD if dist.is_initialized() else None
    return (
        model,
        optimizer,
        Zero3Engine(model, [optimizer], device=device, collectives=make_collectives(group, device)),
    )


def _step(model, optimizer, engine):
    with engine.step():
        loss = model(torch.ones(2, 6))
    with engine.backward():
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _values(one, other):
    """Pairs of the shards of two engines."""
    found = [[c.values for unit in e.units for c in unit.chunks] for e in (one, other)]
    return zip(*found, strict=True)


def _resume(rank, world_size):
    model, optimizer, engine = _engine()
    _step(model, optimizer, engine)
    whole = gather_on_rank_zero(sliced_optimizer_state(engine.steps[optimizer]), rank)
    [saved] = [state for state in engine.collectives.all_gather_object(whole) if state]
    again, resumed, other = _engine()
    for mine, theirs in _values(other, engine):
        mine.copy_(theirs)
    other.weights_changed()
    load_optimizer_state(other.steps[resumed], saved, 0)
    _step(model, optimizer, engine)
    _step(again, resumed, other)
    for mine, theirs in _values(other, engine):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_of_two_dtypes_resumes(world_size):
    run_ranks(_resume, world_size)


def _take_over(rank, world_size):
    model, optimizer, engine = _engine()
    masters = {name: torch.full(p.shape, 1 + 2.0**-12) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        optimizer.state[p] = {"master": masters[name]}
    engine.steps[optimizer].take_state()
    whole = gather_on_rank_zero(sliced_optimizer_state(engine.steps[optimizer]), rank)
    for name, state in whole["state"].items() if whole else ():
        assert state["master"].dtype == torch.float32 and torch.equal(
            state["master"], masters[name]
        )


def test_fp32_copies_of_narrow_weights_stay_fp32():
    run_ranks(_take_over, 2)


def test_what_two_groups_and_the_file_have_had_in_common_is_each_ones_own():
    model = Mixed()
    groups = [{"params": list(layer.parameters())} for layer in (model.wide, model.narrow)]
    optimizer = torch.optim.Adam(groups, lr=torch.tensor(0.1), foreach=False)
    device = torch.device("cpu")
    engine = Zero3Engine(
        model, [optimizer], device=device, collectives=make_collectives(None, device)
    )
    names = [name for name, _ in model.named_parameters()]
    rate, shared = torch.tensor(0.5), torch.tensor(2.0)
    saved = {
        "state": {"shared": [shared]},
        "param_groups": [{"params": names, "lr": rate, "betas": [0.9, 0.99]}],
    }
    step = engine.steps[optimizer]
    assert load_optimizer_state(step, saved, 0) == []
    first, second = optimizer.param_groups
    for tensor in (first["lr"], rate, step.state["shared"][0]):
        tensor += 1
    assert (first["lr"], second["lr"], shared) == (1.5, 0.5, 2.0)
    assert first["betas"] == second["betas"] and first["betas"] is not second["betas"]
