"""Who holds memory of an unsharded unit keeps it: nobody else is unsharded there meanwhile."""

import gc
import warnings

import pytest
import torch
from torch import nn

from helpers.contracts import BLOCKS, build
from helpers.ranks import run_ranks
from lightning_zero3.strategies.engine import ResidencyError, gathered


class Keeps(nn.Linear):
    """A layer that lets others see its weights of the last forward."""

    kept = kept_bias = array = None

    def __init__(self):
        super().__init__(6, 6)

    def forward(self, x):
        self.kept, self.array = self.weight.t(), self.weight.detach().numpy()
        self.kept_bias = self.bias[:]
        return super().forward(x)


class Scaled(nn.Module):
    """Saves a parameter itself, and not a view of it."""

    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x):
        return self.norm(x * self.scale)


def step(model, engine, x):
    with engine.step():
        loss = model(x).square().mean()
    with engine.backward():
        loss.backward()


def keep(rank, world_size, only_on_rank_zero):
    """Views and arrays of all layers outlive their uses; they show what they were made of."""
    model, optimizer, engine = build(rank, world_size, block=Keeps)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(len(model))))
    state = {name: torch.as_tensor(v).clone() for name, v in model.state_dict().items()}
    plain.load_state_dict(state)
    x = torch.linspace(-1, 1, 12).view(2, 6)
    for _ in range(2):
        step(model, engine, x)
        if only_on_rank_zero and rank:
            for layer in model:
                layer.kept = layer.kept_bias = layer.array = None
            gc.collect()
    for layer, reference in zip(model, plain, strict=True):
        if layer.kept is not None:
            torch.testing.assert_close(layer.kept.t(), reference.weight, rtol=0, atol=0)
            torch.testing.assert_close(torch.from_numpy(layer.array), reference.weight.detach())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.zero_grad()
    told = [str(w.message) for w in found if "holds a view of a weight" in str(w.message)]
    assert len(told) == (not (only_on_rank_zero and rank)), told
    step(model, engine, x)  # the weights of now
    reference = torch.optim.SGD(plain.parameters(), lr=optimizer.param_groups[0]["lr"])
    for _ in range(2):
        plain(x).square().mean().backward()
    reference.step()
    with torch.no_grad(), engine.step():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)
    return True


@pytest.mark.parametrize("only_on_rank_zero", [False, True])
def test_what_is_kept_stays_and_disturbs_nobody(only_on_rank_zero):
    assert run_ranks(keep, 2, only_on_rank_zero, timeout=30) == [True, True]


def write(rank, world_size, kept, name):
    """The unit's other parameters are as before the error."""
    model, _, engine = build(rank, world_size, block=Keeps)
    before = model[1].weight.clone()
    x = torch.ones(2, 6)
    step(model, engine, x)
    with torch.no_grad():
        getattr(model[1], kept).mul_(2)
    with pytest.raises(
        ResidencyError, match=f"'1.{name}' was changed in place after its unit's use"
    ):
        with engine.step():
            model(x)
    with torch.no_grad():
        model[1].weight.mul_(3)
    with gathered(model[1].weight, modify=False):  # as it is stored
        assert torch.equal(model[1].weight, 3 * before)


@pytest.mark.parametrize(("kept", "name"), [("kept", "weight"), ("kept_bias", "bias")])
def test_a_write_to_what_is_kept_is_an_error_that_names_the_parameter(kept, name):
    run_ranks(write, 2, kept, name, timeout=30)


def count(rank, world_size):
    """In ordinary training no unit needs memory beside its own."""
    model, optimizer, engine = build(rank, world_size)
    found = [set() for _ in engine.units]  # of each: addresses that it was unsharded to
    for seed in range(3):
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(seed))
        with engine.step():
            loss = model(x).square().mean()
        for unit, places in zip(engine.units, found, strict=True):
            places.add(unit.buffer.start)
        with engine.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(engine.units) == BLOCKS and not [u for u in engine.pool.kept if u.buffer.is_held()]
    return [len(places) for places in found]


def test_ordinary_training_keeps_nothing():
    assert run_ranks(count, 2, timeout=30) == [[1] * BLOCKS] * 2


def across_gathered(rank, world_size):
    """A forward and its backward on two sides of the border of `gathered`."""
    model, optimizer, engine = build(rank, world_size, block=Scaled)
    plain = nn.Sequential(*(Scaled() for _ in range(len(model))))
    plain.load_state_dict({k: torch.as_tensor(v).clone() for k, v in model.state_dict().items()})
    x = torch.linspace(-1, 1, 12).view(2, 6)
    with gathered(model, modify=False):
        loss = model(x).square().mean()
    with engine.backward():
        loss.backward()
    plain(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.clone(), theirs.grad)
    with engine.step():
        loss = model(x).square().mean()
    with pytest.raises(ResidencyError, match="inside of `gathered`"), gathered(model, modify=False):
        with engine.backward():
            loss.backward()
    optimizer.zero_grad()
    with pytest.raises(ResidencyError, match="inside of `gathered`.*stepped by an optimizer"):
        with gathered(model, modify=True):
            optimizer.step()
    with torch.no_grad(), engine.step():
        torch.testing.assert_close(model(x), plain(x))
    return True


def test_a_forward_and_its_backward_on_two_sides_of_gathered():
    assert run_ranks(across_gathered, 2, timeout=30) == [True, True]
