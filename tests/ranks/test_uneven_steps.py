"""Evaluation steps that only some ranks run: what comes out, and what is left behind."""

import pytest
import torch
from torch import nn

from helpers.parity import RTOL
from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import DivergenceError, GroupCollectives
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine, compare_notes
from lightning_zero3.strategies.evaluation.uneven_steps import assist, uneven_step


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 30), nn.Linear(30, 6)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x):
        self.runs += 1  # rank 0's is everybody's after a backward
        return x + self.down(torch.tanh(self.up(x)))


def _model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def _energy(model, x):
    with torch.no_grad():
        return model(x).square().sum()


def _forces(model, x):
    """As a force field is evaluated: by the derivative with respect to its input."""
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        (forces,) = torch.autograd.grad(model(x).square().sum(), x)
    return forces


def _forces_twice(model, x):
    return _forces(model, x) + _forces(model, 2 * x)


def _second_derivative(model, x):
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        (forces,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(forces.square().sum(), x)
    return second


def _loss(model, x):
    """Gradients of the parameters are made too, and dropped."""
    with torch.enable_grad():
        loss = model(x).square().mean()
        loss.backward()
    return loss.detach()


EVALUATIONS = [_energy, _forces, _forces_twice, _second_derivative, _loss]
STEPS = [1, 3, 2]  # of each rank


def _input(rank, step):
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * rank + step))


def _evaluate_and_train(rank, world_size, of_group):
    """For each evaluation: another number of steps on each rank, then a training step; returns all
    results.
    """
    group, device = torch.distributed.group.WORLD, torch.device("cpu")
    collectives = GroupCollectives(group) if of_group else make_collectives(group, device)
    steps, found = STEPS[:world_size], []
    for evaluation in EVALUATIONS:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = Zero3Engine(
            model, [optimizer], device=device, collectives=collectives, unit_policy=[Block]
        )
        results = []
        for step in range(steps[rank]):
            context = engine.step()
            with uneven_step(engine, context) if step >= min(steps) else context:
                results.append(evaluation(model, _input(rank, step)))
        assist(engine, max(steps) - steps[rank])
        optimizer.zero_grad()
        with engine.step():
            loss = model(_input(rank, 9)).square().mean()
        with engine.backward():
            loss.backward()
        found.append((results, model[1].up.weight.grad.clone()))
    return found


@pytest.mark.parametrize("of_group", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_evaluates_its_own_steps(world_size, of_group):
    everyone = run_ranks(_evaluate_and_train, world_size, of_group, timeout=30)
    model = _model()
    (
        sum(model(_input(rank, 9)).square().mean() for rank in range(world_size)) / world_size
    ).backward()
    expected = model[1].up.weight.grad
    for rank, found in enumerate(everyone):
        for evaluation, (results, gradient) in zip(EVALUATIONS, found, strict=True):
            assert len(results) == STEPS[rank]
            for step, result in enumerate(results):
                torch.testing.assert_close(
                    result, evaluation(_model(), _input(rank, step)), rtol=RTOL, atol=1e-6
                )
            torch.testing.assert_close(gradient, expected, rtol=RTOL, atol=1e-6)


def _gradients_of_training(rank, world_size, once):
    """They are there when an evaluation begins that rank 1 runs alone, and are what they were
    after it, whatever its backward makes.
    """
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.device("cpu")
    collectives = make_collectives(torch.distributed.group.WORLD, device)
    engine = Zero3Engine(
        model,
        [optimizer],
        device=device,
        collectives=collectives,
        unit_policy=[Block],
        reduce_once=once,
    )
    with engine.accumulate():
        with engine.step():
            loss = model(_input(rank, 9)).square().mean()
        with engine.backward():
            loss.backward()
    x = _input(rank, 0).requires_grad_()
    if rank == 0:
        assist(engine, 1)
    else:
        with uneven_step(engine, engine.step()):
            model(x).square().mean().backward()
    return x.grad, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("once", [False, True])
def test_gradients_of_parameters_are_dropped_in_a_step_that_not_all_ranks_run(once):
    (_, first), (of_input, second) = run_ranks(_gradients_of_training, 2, once, timeout=60)
    model = _model()
    (sum(model(_input(rank, 9)).square().mean() for rank in range(2)) / 2).backward()
    for found in (first, second):
        torch.testing.assert_close(
            found, [p.grad for p in model.parameters()], rtol=RTOL, atol=1e-6
        )
    x = _input(1, 0).requires_grad_()
    model(x).square().mean().backward()
    torch.testing.assert_close(of_input, x.grad, rtol=RTOL, atol=1e-6)


def _step_alone(rank, world_size):
    """The optimizer of rank 1 has stepped on its part of the model, and rank 0's has not."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.device("cpu")
    collectives = make_collectives(torch.distributed.group.WORLD, device)
    engine = Zero3Engine(
        model, [optimizer], device=device, collectives=collectives, unit_policy=[Block]
    )
    if rank == 0:
        assist(engine, 1)
    else:
        with uneven_step(engine, engine.step()):
            model(_input(rank, 0))
            optimizer.step()
    with pytest.raises(
        DivergenceError,
        match="rank 0 came to nothing more, rank 1 to 0 gradients in param group 0 of SGD",
    ):
        compare_notes(collectives)


def test_a_step_of_an_optimizer_that_not_all_ranks_take():
    run_ranks(_step_alone, 2, timeout=60)
