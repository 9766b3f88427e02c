"""One rank: what is done to the gradients in `optimizer.param_groups`, which are flat, against plain torch."""

import sys

import pytest
import torch
from torch import nn

from lightning_zero3.strategies.collectives import LocalCollectives
from lightning_zero3.strategies.engine import Zero3Engine
from lightning_zero3.strategies.residency import ResidencyError

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """With a layer that nobody uses: the flat tensor of its group is cut around it."""

    def __init__(self):
        super().__init__()
        self.a, self.unused, self.b = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x):
        return self.b(self.a(x)) + self.empty.sum()


class Training:
    def __init__(self, sharded):
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        options = {"device": torch.device("cpu"), "collectives": LocalCollectives()}
        self.engine = Zero3Engine(self.net, [self.optimizer], **options) if sharded else None

    def backward(self, **options):
        if self.engine is None:
            self.net(X).square().sum().backward(**options)
            return
        with self.engine.step():
            loss = self.net(X).square().sum()
        with self.engine.backward():
            loss.backward(**options)

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


def assigned_then_looped(t):
    """Not all have a gradient, and the list is gone through as it is: nothing is changed twice."""
    t.optimizer.zero_grad()
    t.net.a.weight.grad = torch.full((3, 3), 8.0)
    for p in t.optimizer.param_groups[0]["params"]:
        if p.grad is not None:
            p.grad.mul_(2)
    for p in t.groups:
        p.grad.add_(1)
    assert t.net.b.weight.grad is None
    return t.net.a.weight.grad.sum()


def assigned_then_replaced(t):
    t.optimizer.zero_grad()
    t.net.a.weight.grad = torch.full((3, 3), 8.0)
    for p in t.optimizer.param_groups[0]["params"]:
        if p.grad is not None:
            p.grad = p.grad * 2 + 1
    assert t.net.b.weight.grad is None
    return t.net.a.weight.grad.sum()


def all_assigned_then_replaced(t):
    t.optimizer.zero_grad()
    for p in t.net.parameters():
        p.grad = torch.full_like(p, 8.0)
    for p in t.groups:
        p.grad = p.grad * 2
    return t.net.unused.weight.grad.sum()


def given_to_all(t):
    """Those that had none, too: it is `parameter.grad` at once, and what the next backward adds to."""
    t.optimizer.zero_grad()
    t.net.a.weight.grad = torch.full((3, 3), 8.0)
    for p in t.optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    seen = t.net.unused.weight.grad.clone()
    t.backward()
    return torch.cat([seen.flatten(), t.net.unused.weight.grad.flatten(), t.net.a.weight.grad.flatten()])


def given_to_all_one_cleared(t):
    t.optimizer.zero_grad()
    for p in t.optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    t.net.b.weight.grad = None
    t.backward()
    return t.net.b.weight.grad.clone()


def parameter_cleared_then_looped(t):
    t.net.b.weight.grad = None
    for p in t.groups:
        p.grad.mul_(2)
    assert t.net.b.weight.grad is None
    t.backward()
    return t.net.b.weight.grad.clone()


def views_kept(t):
    views = [t.net.a.weight.grad.view(-1), t.net.a.bias.grad[1:], torch.from_numpy(t.net.b.weight.grad.numpy()).flatten()]
    for p in t.groups:
        p.grad = torch.ones_like(p)
    t.optimizer.step()
    t.backward()
    return torch.cat(views)


def view_kept_of_what_was_cleared(t):
    view = t.net.b.weight.grad.view(-1)
    t.net.zero_grad()
    t.optimizer.zero_grad(set_to_none=False)
    return view


def made_with_a_graph(t):
    t.backward(create_graph=True)
    kept = t.net.a.weight.grad
    for p in t.groups:
        p.grad = torch.ones_like(p)
    t.optimizer.step()
    return kept.detach().clone()


def flat_kept(t):
    kept = t.groups
    before = [p.grad for p in kept]
    for p in kept:
        p.grad = p.grad * 2
    t.optimizer.step()
    return sum(grad.pow(2).clone().as_subclass(torch.Tensor).sum() for grad in before)


def some_cleared(t):
    for p in t.of_a:
        p.grad = None
    assert t.net.a.weight.grad is None and t.net.b.weight.grad is not None
    t.backward()
    return t.net.a.weight.grad.clone()


def clipped_while_held(t):
    """What is assigned has memory of its own, and clipping changes that and the others."""
    held = torch.full((2, 3), 6.0)
    t.net.b.weight.grad = held
    for _ in range(3):
        nn.utils.clip_grad_norm_(t.net.parameters(), 0.5)
        held.mul_(3)
        t.backward()
    return held


def some_cleared_while_a_view_is_kept(t):
    """The view of what is not cleared is the gradient, and that of what is cleared is not."""
    view, other = t.net.b.weight.grad.view(-1), t.net.a.weight.grad.view(-1)
    t.net.a.zero_grad()
    t.backward()
    view.add_(1)
    nn.utils.clip_grad_norm_(t.net.parameters(), 0.5)
    return torch.cat([view, other])


def multiplied(t):
    for p in t.groups:
        p.grad *= 2
    kept = t.net.a.weight.grad
    for p in t.groups:
        p.grad += 1
    return kept


def put_back(t):
    kept = [(p, p.grad) for p in t.groups]
    for p, _ in kept:
        p.grad = None
    assert t.net.a.weight.grad is None
    for p, grad in kept:
        p.grad = grad
    t.backward()
    return t.net.a.weight.grad.clone()


def put_back_later(t):
    kept = [(p, p.grad) for p in t.groups]
    t.optimizer.zero_grad()
    t.backward()
    for p, grad in kept:
        p.grad = grad
    return t.net.a.weight.grad.clone()


def changed_then_scaled(t):
    """Whoever holds what was assigned may change it; then all are scaled."""
    held = [(p, torch.ones_like(p)) for p in t.net.b.parameters()]
    for p, grad in held:
        p.grad = grad
    held[0][1].add_(1)
    for p in t.groups:
        p.grad.mul_(3)
    return held[0][1]


def changed_then_replaced(t):
    held = [(p, torch.ones_like(p)) for p in t.net.b.parameters()]
    for p, grad in held:
        p.grad = grad
    held[0][1].add_(1)
    for p in t.groups:
        p.grad = torch.full_like(p, 5.0)
    held[0][1].add_(1)
    return held[0][1]


def replaced_in_a_step(t):
    """By the optimizer itself, of which a view is kept, and then it is read."""
    view = t.net.b.weight.grad.view(-1)
    original = t.optimizer._init_group

    def init_group(group, *args):
        for p in group["params"]:
            if p.grad is not None:
                p.grad = p.grad + 1
        return original(group, *args)

    t.optimizer._init_group = init_group
    t.optimizer.step()
    return torch.cat([view, t.net.b.weight.grad.flatten(), t.net.a.weight.grad.flatten()])


def parameters_put_back(t):
    kept = [p.grad for p in t.net.parameters()]
    t.optimizer.zero_grad()
    for p, grad in zip(t.net.parameters(), kept, strict=True):
        p.grad = grad
    kept[0].mul_(3)
    t.backward()
    return t.net.a.weight.grad.clone()


def moved_after_it_was_replaced(t):
    for p in t.groups:
        p.grad = p.grad.clamp(-1, 1)
    t.net.a.bias.grad.data = t.net.a.bias.grad.data * 2
    return t.net.a.bias.grad


def divided_twice(t):
    """Nobody keeps anything."""
    for _ in range(2):
        t.backward()
        for p in t.groups:
            p.grad /= 3
        t.optimizer.step()


def centralized(t):
    """A variable of the loop outlives it."""
    for p in t.net.parameters():
        if p.grad is not None:
            g = p.grad.data
            if g.dim() > 1:
                p.grad = g - g.mean(1, keepdim=True)
    return g


def without_elements(t):
    t.optimizer.zero_grad()
    t.backward()
    view = t.net.b.weight.grad.view(-1)
    for p in t.groups:
        p.grad = p.grad * 2
    assert t.net.empty.grad is not None
    for p in t.groups:
        p.grad = None
    assert t.net.empty.grad is None
    return view


def scaled_in_a_step(t):
    """What the user has assigned and holds is what the optimizer scales."""
    held = torch.ones(2, 3)
    t.net.b.weight.grad = held
    original = t.optimizer._init_group

    def init_group(group, *args):
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)
        return original(group, *args)

    t.optimizer._init_group = init_group
    t.optimizer.step()
    return torch.cat([held, t.net.b.weight.grad])


PROGRAMS = [
    scaled_in_a_step,
    parameters_put_back,
    moved_after_it_was_replaced,
    divided_twice,
    centralized,
    without_elements,
    some_cleared_while_a_view_is_kept,
    multiplied,
    put_back,
    put_back_later,
    changed_then_scaled,
    changed_then_replaced,
    replaced_in_a_step,
    assigned_then_looped,
    assigned_then_replaced,
    all_assigned_then_replaced,
    given_to_all,
    given_to_all_one_cleared,
    parameter_cleared_then_looped,
    views_kept,
    view_kept_of_what_was_cleared,
    made_with_a_graph,
    flat_kept,
    some_cleared,
    clipped_while_held,
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


def the_last_cleared(t):
    t.groups[-1].grad = None
    t.optimizer.step()


def its_memory_replaced(t):
    for p in t.groups:
        p.grad.data = torch.ones_like(p)


def a_list_of_before(t):
    params = list(t.optimizer.param_groups[0]["params"])
    t.net.b.zero_grad()
    t.optimizer.step()
    return [p.grad for p in params]


REFUSED = {
    the_last_cleared: r"'empty' to 'b.bias' were cleared, replaced or.*and others not.*Do it to all of a param group",
    its_memory_replaced: r"`.data` of the flat gradients of parameters 'empty' to 'b.bias' cannot be set.*p.grad.copy_",
    a_list_of_before: r"'empty' to 'b.bias' was kept, and is not in.*Read the param groups each time",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_refused(program):
    t = Training(True)
    t.backward()
    with pytest.raises(ResidencyError, match=REFUSED[program]):
        program(t)


class Half(nn.Module):
    """Of each layer a half is in use: the flat tensor of a group is cut at each of them."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def lines_of_a_step(layers):
    """That the package runs while gradients are replaced, for the optimizer's step and `zero_grad`, on one rank."""
    net = nn.Sequential(*[Half() for _ in range(layers)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = Zero3Engine(net, [optimizer], device=torch.device("cpu"), collectives=LocalCollectives())
    lines = 0

    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace if "/strategies/" in frame.f_code.co_filename else None

    for step in range(3):
        with engine.step():
            loss = net(X).square().sum()
        with engine.backward():
            loss.backward()
        sys.settrace(trace if step == 2 else None)
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad = p.grad * 2
        optimizer.step()
        optimizer.zero_grad()
        sys.settrace(None)
    assert len(optimizer.param_groups[0]["params"]) > layers
    return lines


def test_twice_the_cuts_cost_twice_as_much():
    few, many = lines_of_a_step(16), lines_of_a_step(32)
    assert many < 2.2 * few  # a little more than 2, to find a parameter's place among more
