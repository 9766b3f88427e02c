"""Gradients that are read, kept or assigned around backwards, beside threads: against plain torch
on the joined batch.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import DivergenceError
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import ResidencyError, Zero3Engine

DIM, CPU = 8, torch.device("cpu")


def build(groups=1):
    """A model with its optimizer and engine, a plain copy with its own, and batches [step, rank,
    rows, DIM].
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    )
    plain = copy.deepcopy(model)

    def optimizer_of(module):
        by_dim = [
            [p for p in module.parameters() if p.dim() > 1],
            [p for p in module.parameters() if p.dim() < 2],
        ]
        return torch.optim.SGD(
            [{"params": params} for params in by_dim] if groups == 2 else module.parameters(),
            lr=0.1,
        )

    optimizer, collectives = optimizer_of(model), make_collectives(dist.group.WORLD, CPU)
    policy = [nn.Linear, nn.LayerNorm]
    engine = Zero3Engine(
        model, [optimizer], device=CPU, collectives=collectives, unit_policy=policy
    )
    return (
        model,
        optimizer,
        engine,
        plain,
        optimizer_of(plain),
        torch.randn(3, collectives.world_size, 4, DIM),
    )


def require_alike(model, plain):
    for ours, its in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.clone(), its.grad)


def forwards_and_backwards_in_a_thread(rank, world_size):
    model, _, engine, plain, _, batches = build()

    def train():
        for batch in batches:
            loss = model(batch[rank]).square().mean()
            with engine.backward():
                loss.backward()

    with engine.step(), ThreadPoolExecutor(1) as pool:
        pool.submit(train).result()
    for batch in batches:
        plain(batch.flatten(0, 1)).square().mean().backward()
    require_alike(model, plain)


def step(engine, model, optimizer, plain, its, batch, rank):
    """One, up to what is done to gradients."""
    with engine.step():
        loss = model(batch[rank]).square().mean()
    for each in (optimizer, its):
        each.zero_grad()
    with engine.backward():
        loss.backward()
    plain(batch.flatten(0, 1)).square().mean().backward()


def buffer_reused_after_the_step(rank, world_size):
    model, optimizer, engine, plain, its, batches = build()
    buffer = torch.zeros(DIM)
    for batch in batches:
        step(engine, model, optimizer, plain, its, batch, rank)
        model[0].bias.grad = buffer.copy_(model[0].bias.grad)
        optimizer.step()
        its.step()
        # each rank's own, and no gradient any more when the next backward begins
        buffer.fill_(rank)
    step(engine, model, optimizer, plain, its, batches[0], rank)
    require_alike(model, plain)


def gradient_of_before_changed(rank, world_size):
    model, optimizer, engine, plain, its, batches = build()
    for batch in batches:
        step(engine, model, optimizer, plain, its, batch, rank)
        kept = model[0].bias.grad
        optimizer.step()
        its.step()
        kept.sub_(1)
    step(engine, model, optimizer, plain, its, batches[0], rank)
    require_alike(model, plain)


def stepped_with_another_gradient(rank, world_size):
    """And zeroed after it, with the same zeros on all."""
    model, optimizer, engine, plain, its, batches = build()
    step(engine, model, optimizer, plain, its, batches[0], rank)
    model[0].bias.grad.mul_(1 + rank)
    optimizer.step()
    model.zero_grad(set_to_none=False)
    with pytest.raises(
        DivergenceError, match=r"a value assigned as gradient to parameter '0\.bias'"
    ):
        step(engine, model, optimizer, plain, its, batches[1], rank)


def assigned_where_gradients_are_over(rank, world_size):
    model, optimizer, engine, plain, its, batches = build()
    step(engine, model, optimizer, plain, its, batches[0], rank)
    with engine.step(gradients_over=True):
        model[0].weight.grad = torch.ones(DIM, DIM)
        assert model[0].weight.grad.sum() == DIM * DIM
        with pytest.raises(ResidencyError, match="'3.bias' was freed when `training_step` began"):
            model[3].bias.grad.clone()


def set_up_in_a_thread(rank, world_size):
    with ThreadPoolExecutor(1) as pool:
        model, _, engine, plain, _, batches = pool.submit(build).result()
    for batch in batches:
        model(batch[rank]).square().mean().backward()
        plain(batch.flatten(0, 1)).square().mean().backward()
    require_alike(model, plain)


def kept_over_a_backward(rank, world_size):
    """Refused where it is this rank's own, on its way; it follows after that."""
    model, _, engine, plain, _, batches = build()
    refused = []

    def look(grad):
        for touch in (kept.norm, lambda: kept.mul_(2)):
            with pytest.raises(ResidencyError, match=r"'3\.bias' was read, or set, in a backward"):
                touch()
            refused.append(touch)

    for number, batch in enumerate(batches):
        with engine.step():
            hidden = model[0](batch[rank])
            if number:
                hidden.register_hook(look)
            loss = model[1:](hidden).square().mean()
        with engine.backward():
            loss.backward()
        plain(batch.flatten(0, 1)).square().mean().backward()
        kept = model[3].bias.grad
    assert len(refused) == 4
    torch.testing.assert_close(kept.clone(), plain[3].bias.grad)
    require_alike(model, plain)


def assigned_in_another_order(rank, world_size):
    model, optimizer, engine, plain, its, batches = build()
    for batch in batches:
        step(engine, model, optimizer, plain, its, batch, rank)
        for module in (model, plain):
            for p in list(module.parameters())[:: 1 - 2 * rank]:
                p.grad = torch.ones_like(p)
        optimizer.step()
        its.step()
    step(engine, model, optimizer, plain, its, batches[0], rank)
    require_alike(model, plain)


def stepped_without_a_gradient(rank, world_size):
    model, optimizer, engine, plain, its, batches = build()
    step(engine, model, optimizer, plain, its, batches[0], rank)
    kept = model[0].bias.grad
    optimizer.step()
    its.step()
    kept.sub_(1)
    optimizer.zero_grad()
    optimizer.step()
    step(engine, model, optimizer, plain, its, batches[1], rank)
    require_alike(model, plain)


def zeroed_after_an_exception(rank, world_size):
    """`torch.autograd.grad` between the zeros and the next backward."""
    model, optimizer, engine, plain, its, batches = build()
    step(engine, model, optimizer, plain, its, batches[0], rank)
    with pytest.raises(KeyError), engine.step():
        hidden = model[0](batches[1][rank])
        hidden.register_hook(lambda grad: {}["a key"])
        model[1:](hidden).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    x = batches[1][rank].clone().requires_grad_()
    with engine.step():
        torch.autograd.grad(model(x).square().mean(), x)
        loss = model(batches[2][rank]).square().mean()
    with engine.backward():
        loss.backward()
    plain.zero_grad()
    plain(batches[2].flatten(0, 1)).square().mean().backward()
    require_alike(model, plain)


def zeroed_by_the_module(rank, world_size):
    """Nothing is exchanged, whatever was read before."""
    model, _, engine, _, _, batches = build()
    exchanges = engine.collectives.exchange_log.progress

    def train():
        with engine.step():
            loss = model(batches[0][rank]).square().mean()
        with engine.backward():
            loss.backward()

    for to_none in (True, False):
        for read in ([], [0], [0, 3]):
            train()
            for index in read:
                model[index].bias.grad.norm()
            before = exchanges[1]
            model.zero_grad(set_to_none=to_none)
            assert exchanges[1] == before, (to_none, read)


@pytest.mark.parametrize(
    "case",
    [
        zeroed_by_the_module,
        kept_over_a_backward,
        assigned_where_gradients_are_over,
        assigned_in_another_order,
        stepped_without_a_gradient,
        zeroed_after_an_exception,
        forwards_and_backwards_in_a_thread,
        buffer_reused_after_the_step,
        gradient_of_before_changed,
        stepped_with_another_gradient,
    ],
)
def test_between_ranks(case):
    run_ranks(case, 2)


def test_one_rank_that_was_set_up_in_a_thread():
    run_ranks(set_up_in_a_thread, 1)
