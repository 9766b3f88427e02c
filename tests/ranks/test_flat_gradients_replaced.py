"""One rank: gradients put in the place of those in `optimizer.param_groups`, which are flat, against plain torch."""

import pytest
import torch
from torch import nn

from lightning_zero3.strategies.collectives import LocalCollectives
from lightning_zero3.strategies.engine import Zero3Engine

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """With a layer that nobody uses: the flat tensor of its group is cut around it."""

    def __init__(self):
        super().__init__()
        self.a, self.unused, self.b = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        return self.b(self.a(x))


class Training:
    def __init__(self, sharded):
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        options = {"device": torch.device("cpu"), "collectives": LocalCollectives()}
        self.engine = Zero3Engine(self.net, [self.optimizer], **options) if sharded else None

    def backward(self):
        if self.engine is None:
            self.net(X).square().sum().backward()
            return
        with self.engine.step():
            loss = self.net(X).square().sum()
        with self.engine.backward():
            loss.backward()

    @property
    def groups(self):
        """What is there to be replaced."""
        return [p for p in self.optimizer.param_groups[0]["params"] if p.grad is not None]

    @property
    def of_a(self):
        """The same of the layer `a` alone."""
        return self.groups[:1] if self.engine else list(self.net.a.parameters())


def read(t):
    for p in t.groups:
        p.grad = torch.ones_like(p)
    return t.net.a.weight.grad.sum()


def doubled(t):
    for p in t.groups:
        p.grad = p.grad * 2
    return t.net.b.weight.grad.clone()


def written_afterwards(t):
    """`p.grad` is what was put there."""
    new = [torch.zeros_like(p) for p in t.groups]
    for p, g in zip(t.groups, new, strict=True):
        p.grad = g
    for p, g in zip(t.groups, new, strict=True):
        assert p.grad is g
        g.add_(1)
    return t.net.a.weight.grad.sum()


def replaced_twice(t):
    for p in t.groups:
        p.grad = torch.ones_like(p)
    t.net.a.weight.grad.mul_(3)
    t.net.b.weight.grad = torch.full((2, 3), 7.0)
    for p in t.of_a:
        p.grad = p.grad * 2
    return t.net.a.weight.grad.sum() + t.net.b.weight.grad.sum()


def held_before(t):
    kept = t.net.a.weight.grad
    for p in t.groups:
        p.grad = torch.ones_like(p)
    return kept


def kept_while_new(t):
    """It is the gradient, of later backwards, too."""
    for p in t.groups:
        p.grad = torch.full_like(p, 4.0)
    kept, row = t.net.a.weight.grad, t.net.b.weight.grad[0]
    t.backward()
    return torch.cat([kept.flatten(), row])


def kept_and_written(t):
    for p in t.groups:
        p.grad = torch.full_like(p, 4.0)
    kept = t.net.a.weight.grad
    t.backward()
    kept.add_(1)


def another_assigned(t):
    for p in t.net.b.parameters():
        p.grad = torch.full_like(p, 5.0)
    for p in t.of_a:
        p.grad = torch.ones_like(p)
    return t.net.b.weight.grad.sum()


def another_cleared(t):
    t.net.b.zero_grad()
    for p in t.of_a:
        p.grad = torch.ones_like(p)
    assert t.net.b.weight.grad is None


def expanded(t):
    for p in t.groups:
        p.grad = torch.ones(1).expand(p.shape)
    return t.net.b.weight.grad.sum()


def accumulated_to(t):
    for p in t.groups:
        p.grad = torch.ones_like(p)
    t.backward()
    return t.net.a.weight.grad.sum()


def in_a_hook(t):
    def replace(grad):
        for p in t.of_a:
            p.grad = torch.ones_like(p)

    t.net.b.weight.register_hook(replace)
    t.backward()
    return t.net.a.weight.grad.sum()


def deleted(t):
    for p in t.groups:
        del p.grad
    assert all(p.grad is None for p in t.net.parameters())


def held_over_a_step(t):
    """Nothing was replaced: what the engine does in a step is no assignment."""
    kept = t.net.a.weight.grad
    t.optimizer.step()
    assert t.net.a.weight.grad is kept
    kept.zero_()
    return t.net.a.weight.grad.sum()


PROGRAMS = [
    read,
    doubled,
    written_afterwards,
    replaced_twice,
    held_before,
    kept_while_new,
    kept_and_written,
    another_assigned,
    another_cleared,
    expanded,
    accumulated_to,
    in_a_hook,
    deleted,
    held_over_a_step,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_in_torch(program):
    found = []
    for sharded in (False, True):
        t = Training(sharded)
        t.backward()
        seen = program(t)
        t.optimizer.step()
        found.append([*t.net.state_dict().values(), torch.zeros(()) if seen is None else seen])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
