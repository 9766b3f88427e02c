"""An error that a user catches leaves nothing behind: later forwards compute with the weights that
are stored.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import ResidencyError, Zero3Engine

DIM, CPU = 6, torch.device("cpu")


class Doubling(nn.Module):
    """Doubles its weight in the first forward after it was told so."""

    doubles = False

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x):
        if self.doubles:
            self.doubles = False
            with torch.no_grad():
                self.linear.weight.mul_(2)
        return self.linear(x)


def build(*layers, policy=(Doubling,), **options):
    """A model of ``layers``, what it computes of ones, and its engine."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layers or (Doubling() for _ in range(2))))
    expected = compute(model)
    options = {"slot_dtype": lambda name, parameter: torch.bfloat16} | options
    collectives = make_collectives(dist.group.WORLD, CPU)
    return (
        model,
        expected,
        Zero3Engine(model, device=CPU, collectives=collectives, unit_policy=policy, **options),
    )


def compute(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(torch.ones(2, DIM))


def in_a_step(rank, world_size):
    model, expected, engine = build()
    model[1].doubles = True  # the last one: nobody else takes its memory
    with (
        pytest.raises(ResidencyError, match=r"'1\.linear\.weight' was changed in place"),
        engine.step(),
    ):
        compute(model)
    with engine.step():
        assert torch.equal(compute(model), expected)


def outside_of_steps(rank, world_size):
    model, expected, _ = build()
    model[1].doubles = True
    with pytest.raises(ResidencyError, match=r"'1\.linear\.weight' was changed in place"):
        compute(model)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, (
        "the hooks of the step that was none"
    )
    assert torch.equal(compute(model), expected)


def fail_elsewhere(grad):
    """A backward of a model of another thread's, which fails."""
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: {}["a key"])
    with torch.enable_grad():
        loss = x.sum()
    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyError):
        pool.submit(loss.backward).result()


def build_with_sgd(rank, world_size):
    """Three layers, their engine and optimizer, this rank's batch, and the gradients of a plain
    copy on the batches of all ranks.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
    plain, batches = copy.deepcopy(model), torch.randn(world_size, 4, DIM)
    plain(batches.flatten(0, 1)).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    collectives = make_collectives(dist.group.WORLD, CPU)
    engine = Zero3Engine(
        model, [optimizer], device=CPU, collectives=collectives, unit_policy=[nn.Linear]
    )
    return model, engine, optimizer, batches[rank], [p.grad for p in plain.parameters()]


def require_gradients(model, expected):
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.clone(), gradient)


def while_a_backward_runs(rank, world_size):
    model, engine, _, batch, expected = build_with_sgd(rank, world_size)
    with engine.step():
        hidden = model[1](model[0](batch))
        # the last layer has its gradient by then, and the first has none
        hidden.register_hook(fail_elsewhere)
        loss = model[2](hidden).square().mean()
    with engine.backward():
        loss.backward()
    require_gradients(model, expected)


def fail(grad):
    raise ArithmeticError


def gradients_before_it_are_cleared(rank, world_size):
    """Of a backward that fails, without `manual_backward`."""
    model, engine, _, batch, expected = build_with_sgd(rank, world_size)

    def loss(hook=None):
        with engine.step():
            hidden = model[0](batch)
            if hook is not None:
                hidden.register_hook(hook)
            return model[2](model[1](hidden)).square().mean()

    loss().backward()
    with pytest.raises(ArithmeticError):
        loss(fail).backward()
    assert [p.grad for p in model.parameters()] == [None] * len(expected)
    loss().backward()
    require_gradients(model, expected)


def tried_again(rank, world_size):
    """A backward that failed in the unit in which the next one begins; nobody looks between."""
    model, engine, _, batch, expected = build_with_sgd(rank, world_size)
    with engine.step():
        hidden, other = (model[1](model[0](batch)) * 1 for _ in range(2))
        hidden.register_hook(fail)
        losses = [model[2](each).square().mean() for each in (hidden, other)]
    with pytest.raises(ArithmeticError):
        losses[0].backward()
    losses[1].backward()
    require_gradients(model, expected)


def stepped_again(rank, world_size):
    """A step of the optimizer that failed; gradients stay, as in torch."""
    model, engine, optimizer, batch, expected = build_with_sgd(rank, world_size)
    with engine.step():
        loss = model(batch).square().mean()
    with engine.backward():
        loss.backward()
    before, (group,) = [p.clone() for p in model.parameters()], optimizer.param_groups
    group["lr"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    require_gradients(model, expected)
    group["lr"] = 1.0
    optimizer.step()
    for parameter, old, gradient in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(parameter.detach().clone(), old - gradient)


@pytest.mark.parametrize(
    "case",
    [
        in_a_step,
        outside_of_steps,
        while_a_backward_runs,
        gradients_before_it_are_cleared,
        tried_again,
        stepped_again,
    ],
)
def test_what_follows_is_right(case):
    run_ranks(case, 2)
