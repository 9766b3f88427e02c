"""Tensors that users hold of gradients: with gradients that ranks hold back, and let go when nobody
has them.
"""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.parity import RTOL
from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine

CPU = torch.device("cpu")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def sharded(**options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    communicator = make_collectives(dist.group.WORLD, CPU)
    return (
        model,
        optimizer,
        Zero3Engine(
            model,
            [optimizer],
            device=CPU,
            collectives=communicator,
            unit_policy=["Linear"],
            **options,
        ),
    )


def batch(rank, number):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def read(parameter):
    return parameter.grad


def assign(parameter):
    parameter.grad = own = 2 * parameter.grad
    return own


def accumulate(model, optimizer, backward, hold):
    """Two steps of three micro-batches; gradients that were held after the first are scaled after
    each. Returns their norms.
    """
    norms = []
    for step in range(2):
        held = []
        for micro in range(3):
            backward(3 * step + micro, last=micro == 2)
            held = held or [hold(p) for p in model.parameters()]
            norms += [grad.norm().item() for grad in held]
            for grad in held:
                grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return norms


def accumulate_sharded(rank, world_size, hold, reduce_once):
    model, optimizer, engine = sharded(reduce_once=reduce_once)

    def backward(number, last):
        with engine.step(), engine.backward() if last else engine.accumulate():
            loss = model(batch(rank, number)).square().mean()
            if last:
                loss.backward()
            else:
                with engine.backward():
                    loss.backward()

    return accumulate(model, optimizer, backward, hold)


@pytest.mark.parametrize("reduce_once", [False, True])
@pytest.mark.parametrize("hold", [read, assign])
def test_they_follow_and_are_stored_in_every_micro_batch(hold, reduce_once):
    model = net()

    def backward(number, last):
        (sum(model(batch(rank, number)).square().mean() for rank in range(2)) / 2).backward()

    expected = accumulate(model, torch.optim.SGD(model.parameters(), lr=0.5), backward, hold)
    for found in run_ranks(accumulate_sharded, 2, hold, reduce_once):
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected), rtol=RTOL, atol=1e-6
        )


def count_gathers(rank, world_size, keeps):
    """Of gradients that were assigned, when those of the optimizer are scaled after."""
    model, optimizer, engine = sharded()
    with engine.step(), engine.backward():
        model(batch(rank, 0)).square().mean().backward()
    kept = []
    for p in model.parameters():
        p.grad = own = 2 * p.grad
        kept += [own] if keeps else []
    own = None
    engine.adopt_gradients()
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(0.5)
    gathers, full = [], engine.gradients.full
    engine.gradients.full = lambda entry: gathers.append(entry.name) or full(entry)
    engine.adopt_gradients()
    return len(gathers), sum(each.norm().item() for each in kept)


def test_only_those_that_somebody_has_are_gathered_again():
    assert run_ranks(count_gathers, 2, False) == [(0, 0)] * 2
    for gathered, norm in run_ranks(count_gathers, 2, True):
        assert gathered == 4
        model = net()
        (sum(model(batch(rank, 0)).square().mean() for rank in range(2)) / 2).backward()
        assert norm == pytest.approx(
            sum(p.grad.norm().item() for p in model.parameters()), rel=1e-5
        )


def let_go(rank, world_size):
    """Whether gradients that were assigned are still in memory after they were stored, and what is
    there.
    """
    model, _, engine = sharded()
    with engine.step(), engine.backward():
        model(batch(rank, 0)).square().mean().backward()
    assigned = []
    for p in model.parameters():
        p.grad = 2 * p.grad
        assigned.append(weakref.ref(p.grad))
    engine.adopt_gradients()
    return [grad() is not None for grad in assigned], sum(
        p.grad.norm().item() for p in model.parameters()
    )


def test_on_one_rank_what_nobody_has_is_freed():
    ((there, norm),) = run_ranks(let_go, 1)
    assert there == [False] * 4
    model = net()
    model(batch(0, 0)).square().mean().backward()
    assert norm == pytest.approx(
        2 * sum(p.grad.norm().item() for p in model.parameters()), rel=1e-5
    )
