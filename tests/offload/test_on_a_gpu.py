"""Offload and activations on a device: the same programs, and memory that is the device's.

The step of the host has other kernels than the device's, so that what both compute is compared to
rounding; what only moves is compared to the bit.
"""

from unittest.mock import patch

import pytest
import torch
from torch import nn

from helpers.ranks import run_ranks
from helpers.tracking import needs_cuda
from lightning_zero3.strategies import activations
from lightning_zero3.strategies.collectives import LocalCollectives
from lightning_zero3.strategies.engine import Offload, Zero3Engine
from lightning_zero3.strategies.optimizers.param_groups import ParamGroups
from offload.test_activations import HOW, train

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
ON_HOST = [Offload("optimizer"), Offload("parameters")]


@patch.object(activations, "SMALLEST", 1)
def train_all(rank, world_size, device):
    """{(how, offload, budget): losses and values}."""
    device = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return {
        (how, offload, budget): train(0, 1, budget, False, how, offload, device)
        for how in (HOW if device.type == "cuda" else ["plain"])
        for offload in (None, *ON_HOST)
        for budget in (None, 0, 4000)
    }


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_numbers(device):
    (found,) = run_ranks(train_all, 1, device, timeout=300)
    for (how, offload, budget), (losses, values) in found.items():
        alike = found[how, ON_HOST[0] if offload else None, None]
        assert losses == alike[0], (how, offload, budget)
        assert all(map(torch.equal, values, alike[1])), (how, offload, budget)
        torch.testing.assert_close(losses, found[how, None, None][0], rtol=1e-4, atol=1e-5)


def clip(where, device, micro):
    """Norms of gradients, which are clipped by them; and losses."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(300, 300, device=device) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = Zero3Engine(
        model,
        [optimizer],
        device=device,
        collectives=LocalCollectives(alone=False),
        unit_policy=list,
        offload=where,
    )
    ParamGroups([optimizer], lambda: engine, device).start(engine)
    found = []
    for _ in range(3):
        for _ in range(micro):
            with engine.step():
                loss = model(torch.randn(8, 300).to(device)).square().mean()
            with engine.backward():
                loss.backward()
        norm = engine.gradient_norm(engine.gradients.trained)
        for part in engine.steps[optimizer].parts_of_gradients():
            part.mul_(0.1 / norm.to(part.device))
        found += [loss.item(), norm.item(), engine.gradient_norm(engine.gradients.trained).item()]
        optimizer.step()
        optimizer.zero_grad()
    engine.unshard()
    return found


def clip_all(rank, world_size, device):
    device = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return [[clip(where, device, n) for where in (None, *ON_HOST)] for n in (1, 2)]


@pytest.mark.parametrize("device", DEVICES)
def test_norms(device):
    (runs,) = run_ranks(clip_all, 1, device, timeout=100)
    for expected, *found in runs:
        assert all(its == pytest.approx(expected, rel=1e-5) for its in found)
        assert expected[2] == pytest.approx(0.1, rel=1e-5)


def peaks(rank, world_size):
    """The most that is allocated in a step, by option; bytes."""
    found, device = {}, torch.device("cuda", 0)
    for name, options in {
        "none": {},
        "optimizer": {"offload": Offload("optimizer")},
        "parameters": {"offload": Offload("parameters")},
        "activations": {},
    }.items():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(24)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        collectives = LocalCollectives(alone=False)
        engine = Zero3Engine(
            model,
            [optimizer],
            device=device,
            collectives=collectives,
            unit_policy=list,
            **options,
        )
        if name == "activations":
            activations.Activations(0, engine)
        ParamGroups([optimizer], lambda engine=engine: engine, device).start(engine)
        batch = torch.randn(8192, 1024, device=device)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            with engine.step():
                loss = model(batch).square().mean()
            with engine.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
        found[name] = torch.cuda.max_memory_allocated()
        engine.unshard()
        del engine, model, optimizer, batch, loss
    return found


@pytest.mark.gpu
@needs_cuda
def test_memory():
    (found,) = run_ranks(peaks, 1, timeout=200)
    state, saved = 24 * 1024 * 1025 * 4, 24 * 2 * 8192 * 1024 * 4
    # gradients and moments; of fp32 values the shard stays with "optimizer"
    assert found["none"] - found["optimizer"] > 0.9 * 3 * state
    assert found["none"] - found["parameters"] > 0.9 * 4 * state
    assert found["none"] - found["activations"] > 0.8 * saved
