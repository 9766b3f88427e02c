"""Evaluation steps that only some ranks run: what comes out, and what is left behind."""

import pytest
import torch
from torch import nn

from helpers.parity import RTOL
from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import (
    DivergenceError,
    GroupCollectives,
    make_collectives,
)
from lightning_zero3.strategies.engine import ResidencyError, Zero3Engine, compare_notes


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
    """Gradients of the parameters are made too, and thrown away."""
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
            with engine.joint.run(context) if step >= min(steps) else context:
                results.append(evaluation(model, _input(rank, step)))
        engine.joint.assist(max(steps) - steps[rank])
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


def _read_gradients(rank, world_size, of_group, once):
    """Gradients of a training step, held back or not, read in evaluation steps that not all ranks
    run, and then by all.
    """
    group, device = torch.distributed.group.WORLD, torch.device("cpu")
    model, steps, found = _model(), STEPS[:world_size], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collectives = GroupCollectives(group) if of_group else make_collectives(group, device)
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

    def read():
        found.append([model[k].up.weight.grad.clone() for k in (1, 3)])

    for step in range(steps[rank]):
        context = engine.step()
        with engine.joint.run(context) if step >= min(steps) else context, torch.no_grad():
            if step:  # some ranks have read them before, and some have not
                read()
            model(_input(rank, step))
    engine.joint.assist(max(steps) - steps[rank])
    read()
    return found


@pytest.mark.parametrize("of_group", [False, True])
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_read_in_steps_that_not_all_ranks_run(world_size, once, of_group):
    model = _model()
    (
        sum(model(_input(rank, 9)).square().mean() for rank in range(world_size)) / world_size
    ).backward()
    expected = [model[k].up.weight.grad for k in (1, 3)]
    for rank, found in enumerate(
        run_ranks(_read_gradients, world_size, of_group, once, timeout=60)
    ):
        assert len(found) == STEPS[rank]
        for gradients in found:
            torch.testing.assert_close(gradients, expected, rtol=RTOL, atol=1e-6)


def _differentiate(rank, world_size, set_to_none):
    """A backward in each step, read and cleared there, by the module; ranks that assist have
    nothing to clear.
    """
    model, steps, found = _model(), STEPS[:world_size], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.device("cpu")
    collectives = make_collectives(torch.distributed.group.WORLD, device)
    engine = Zero3Engine(
        model, [optimizer], device=device, collectives=collectives, unit_policy=[Block]
    )
    for step in range(steps[rank]):
        context = engine.step()
        with engine.joint.run(context) if step >= min(steps) else context:
            model(_input(rank, step)).square().mean().backward()
            found.append([model[k].up.weight.grad.clone() for k in (1, 3)])
            model.zero_grad(set_to_none=set_to_none)
    engine.joint.assist(max(steps) - steps[rank])
    return found


@pytest.mark.parametrize("set_to_none", [True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_that_are_cleared_in_steps_that_not_all_ranks_run(world_size, set_to_none):
    found = run_ranks(_differentiate, world_size, set_to_none, timeout=60)
    for step in range(max(STEPS[:world_size])):
        model, running = _model(), [rank for rank in range(world_size) if STEPS[rank] > step]
        (sum(model(_input(rank, step)).square().mean() for rank in running) / world_size).backward()
        for rank in running:
            expected = [model[k].up.weight.grad for k in (1, 3)]
            torch.testing.assert_close(found[rank][step], expected, rtol=RTOL, atol=1e-6)


def _at_the_start(model, x):
    model.zero_grad()
    model(x).square().mean().backward()


def _each_time(model, x):
    for _ in range(2):
        model.zero_grad()
        model(x).square().mean().backward()


def _one_block(model, x):
    """What the others had is added to."""
    model[2].zero_grad()
    model(x).square().mean().backward()


def _one_block_again(model, x):
    model(x).square().mean().backward()
    model[2].zero_grad()
    model[3].up.zero_grad()
    model(2 * x).square().mean().backward()


def _clear_before(rank, world_size, evaluation, lasting):
    """Gradients of training are there when evaluation steps begin, of which rank 0 has one and rank
    1 three.
    """
    model, found = _model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.device("cpu")
    collectives = make_collectives(torch.distributed.group.WORLD, device)
    engine = Zero3Engine(
        model, [optimizer], device=device, collectives=collectives, unit_policy=[Block]
    )
    engine.reducer.lasting = lasting  # as on a GPU

    def train():
        with engine.step():
            loss = model(_input(rank, 9)).square().mean()
        with engine.backward():
            loss.backward()

    if lasting:
        train()
        optimizer.zero_grad()
    train()
    for step in range(STEPS[rank]):
        context = engine.step()
        with engine.joint.run(context) if step >= min(STEPS[:world_size]) else context:
            evaluation(model, _input(rank, step))
            found.append([p.grad.clone() for p in model.parameters()])
    engine.joint.assist(max(STEPS[:world_size]) - STEPS[rank])
    train()  # is added to those of the last evaluation
    model[0].up.weight.grad.norm()
    engine.adopt_gradients()
    found.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    return found


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("evaluation", [_at_the_start, _each_time, _one_block, _one_block_again])
def test_gradients_that_are_cleared_before_a_backward_that_not_all_ranks_run(evaluation, lasting):
    everyone, world_size = run_ranks(_clear_before, 2, evaluation, lasting, timeout=60), 2
    alone = [_model() for _ in range(world_size)]  # each has the gradients of one rank

    def require(found):
        for parameters, gradient in zip(
            zip(*(m.parameters() for m in alone), strict=True), found, strict=True
        ):
            expected = sum(p.grad for p in parameters if p.grad is not None) / world_size
            torch.testing.assert_close(gradient, expected, rtol=RTOL, atol=1e-6)

    for rank, model in enumerate(alone):
        model(_input(rank, 9)).square().mean().backward()
    for step in range(max(STEPS[:world_size])):
        for rank, model in enumerate(alone):
            # A rank that assists has a loss of nothing: it clears what the others clear.
            evaluation(model, _input(rank, step)) if STEPS[rank] > step else evaluation(
                model, torch.zeros(0, 6)
            )
        for rank, found in enumerate(everyone):
            if STEPS[rank] > step:
                require(found[step])
    for rank, model in enumerate(alone):
        model(_input(rank, 9)).square().mean().backward()
    for found in everyone:
        require(found[-1])


def _change(rank, world_size):
    """In place, in a step that rank 1 alone runs: rank 0 would keep its part as it was."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.device("cpu")
    collectives = make_collectives(torch.distributed.group.WORLD, device)
    engine = Zero3Engine(
        model, [optimizer], device=device, collectives=collectives, unit_policy=[Block]
    )
    if rank == 0:
        engine.joint.assist(1)
        return
    with engine.joint.run(engine.step()):
        model(_input(rank, 0)).square().mean().backward()
        for change in (
            lambda: model[0].up.weight.grad.mul_(2),
            lambda: optimizer.zero_grad(set_to_none=False),
        ):
            with pytest.raises(
                ResidencyError,
                match="'0.up.weight' was assigned or changed in a step of an evaluation",
            ):
                change()


def test_gradients_that_are_changed_in_a_step_that_not_all_ranks_run():
    run_ranks(_change, 2, timeout=60)


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
        engine.joint.assist(1)
    else:
        with engine.joint.run(engine.step()):
            model(_input(rank, 0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(
        DivergenceError,
        match="Param group 0 of SGD had gradients .* on rank 1 alone; rank 0 did not",
    ):
        compare_notes(collectives)


def test_a_step_of_an_optimizer_that_not_all_ranks_take():
    run_ranks(_step_alone, 2, timeout=60)
