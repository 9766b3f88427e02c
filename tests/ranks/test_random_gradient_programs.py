"""Random programs that read, keep, assign, change and clear gradients, of parameters and in param
groups.
"""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import LocalCollectives
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine, gathered

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
NAMES = [f"{layer}.{name}" for layer in "abc" for name in ("weight", "bias")]


class Net(nn.Module):
    """With a layer that nobody uses, and two that some backwards do not reach."""

    def __init__(self):
        super().__init__()
        self.a, self.unused, self.b, self.c = (
            nn.Linear(3, 3),
            nn.Linear(3, 3),
            nn.Linear(3, 3),
            nn.Linear(3, 2),
        )
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x, shortcut):
        return self.c(x if shortcut else self.b(self.a(x))) + self.empty.sum()


class Training:
    """A model in training, what its user keeps, and what was seen."""

    def __init__(self, collectives, groups, momentum):
        torch.manual_seed(0)
        self.net = net = Net()
        halves = [
            [*net.a.parameters(), *net.unused.parameters(), net.empty],
            [*net.b.parameters(), *net.c.parameters()],
        ]
        params = halves if groups == 2 else [sum(halves, [])]
        self.optimizer = torch.optim.SGD(
            [{"params": each} for each in params], lr=0.01, momentum=momentum
        )
        options = {"device": torch.device("cpu"), "collectives": collectives}
        self.engine = Zero3Engine(net, [self.optimizer], **options) if collectives else None
        self.seen = []

    def flats(self, group):
        """The tensors of a param group that have a gradient, one after another."""
        for p in self.optimizer.param_groups[group]["params"]:
            if p.grad is not None:
                yield p

    def backward(self, shortcut):
        if self.engine is None:
            self.net(X, shortcut).square().sum().backward()
            return
        with self.engine.step():
            loss = self.net(X, shortcut).square().sum()
        with self.engine.backward():
            loss.backward()

    def step(self):
        self.optimizer.step()

    def clip(self):
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)

    # Gradients of parameters.

    def read(self, name):
        grad = self.net.get_parameter(name).grad
        self.seen.append(None if grad is None else grad.clone())

    def assign(self, name, value):
        self.net.get_parameter(name).grad = torch.full_like(self.net.get_parameter(name), value)

    def change(self, name):
        if (grad := self.net.get_parameter(name).grad) is not None:
            grad.mul_(3)

    def clear(self, name):
        self.net.get_parameter(name).grad = None

    def clear_layer(self, layer, to_none):
        self.net.get_submodule(layer).zero_grad(set_to_none=to_none)

    def clear_model(self, to_none):
        self.net.zero_grad(set_to_none=to_none)

    # Those in param groups.

    def scale(self, group):
        for p in self.flats(group):
            p.grad.mul_(2)

    def multiply(self, group):
        for p in self.flats(group):
            p.grad *= 2

    def clear_optimizer(self, to_none):
        self.optimizer.zero_grad(set_to_none=to_none)


def write(rng, groups):
    """A program: names of methods, with arguments."""
    a_name, a_flag = lambda: rng.choice(NAMES), lambda: rng.random() < 0.5
    arguments = {
        "clip": (),
        "step": (),
        "backward": (lambda: rng.random() < 0.25,),
        "read": (a_name,),
        "assign": (a_name, lambda: rng.randint(1, 9)),
        "change": (a_name,),
        "clear": (a_name,),
        "clear_layer": (lambda: rng.choice("abc"), a_flag),
        "clear_model": (a_flag,),
        "clear_optimizer": (a_flag,),
        "scale": (lambda: rng.randrange(groups),),
        "multiply": (lambda: rng.randrange(groups),),
    }
    program = [("backward", False)]
    for _ in range(rng.randint(3, 10)):
        name = rng.choice(list(arguments))
        program.append((name, *(argument() for argument in arguments[name])))
    return program


def run(collectives, groups, momentum, program):
    t = Training(collectives, groups, momentum)
    parameters = list(t.net.parameters())
    try:
        for name, *arguments in program:
            getattr(t, name)(*arguments)
        grads = [None if p.grad is None else p.grad.clone() for p in parameters]
        with gathered(t.net, modify=False):
            return [*t.seen, *grads, *(p.detach().clone() for p in parameters)]
    finally:
        # an engine on one rank is told of all backwards until it is freed, and looks for what was
        # assigned
        for p in [*parameters, *(p for group in t.optimizer.param_groups for p in group["params"])]:
            p.grad = None


def not_empty(*args, make=torch.empty_like, **kwargs):
    """Memory as others left it."""
    made = make(*args, **kwargs)
    return made.fill_(12345.0) if made.is_floating_point() else made


def compare(rank, world_size, groups, programs):
    torch.empty_like = not_empty  # as long as the process of a rank lives
    rng = random.Random(groups)
    for _ in range(programs):
        program, momentum = write(rng, groups), rng.choice([0, 0.9])
        expected = run(None, groups, momentum, program)
        collectives = (
            LocalCollectives()
            if world_size == 1
            else make_collectives(dist.group.WORLD, torch.device("cpu"))
        )
        try:
            found = run(collectives, groups, momentum, program)
        except Exception as error:
            raise AssertionError(str(program)) from error
        for have, want in zip(found, expected, strict=True):
            assert (have is None) == (want is None), program
            if want is not None:
                torch.testing.assert_close(
                    have,
                    want,
                    rtol=1e-5,
                    atol=1e-6,
                    msg=lambda m, program=program: f"{m}\n{program}",
                )


@pytest.mark.parametrize("groups", [1, 2])
def test_on_one_rank(groups):
    run_ranks(compare, 1, groups, 600)


@pytest.mark.parametrize("groups", [1, 2])
def test_on_two_ranks(groups):
    """Of the same data, so that one process is the reference."""
    run_ranks(compare, 2, groups, 200)
