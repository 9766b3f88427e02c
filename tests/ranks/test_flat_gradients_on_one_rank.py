"""One rank: what is done to the gradients in `optimizer.param_groups`, which are flat, against
plain torch.
"""

import pickle
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
        p.grad.copy_(torch.ones_like(p))
    return t.net.a.weight.grad.sum()


def doubled(t):
    for p in t.groups:
        p.grad.copy_(p.grad * 2)
    return t.net.b.weight.grad.clone()


def replaced_twice(t):
    for p in t.groups:
        p.grad.copy_(torch.ones_like(p))
    t.net.a.weight.grad.mul_(3)
    t.net.b.weight.grad = torch.full((2, 3), 7.0)
    for p in t.of_a:
        p.grad.copy_(p.grad * 2)
    return t.net.a.weight.grad.sum() + t.net.b.weight.grad.sum()


def another_assigned(t):
    for p in t.net.b.parameters():
        p.grad = torch.full_like(p, 5.0)
    for p in t.of_a:
        p.grad.copy_(torch.ones_like(p))
    return t.net.b.weight.grad.sum()


def another_cleared(t):
    t.net.b.zero_grad()
    for p in t.of_a:
        p.grad.copy_(torch.ones_like(p))
    assert t.net.b.weight.grad is None


def accumulated_to(t):
    for p in t.groups:
        p.grad.copy_(torch.ones_like(p))
    t.backward()
    return t.net.a.weight.grad.sum()


def in_a_hook(t):
    def replace(grad):
        for p in t.of_a:
            p.grad.copy_(torch.ones_like(p))

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


def parameter_cleared_then_looped(t):
    t.net.b.weight.grad = None
    for p in t.groups:
        p.grad.mul_(2)
    assert t.net.b.weight.grad is None
    t.backward()
    return t.net.b.weight.grad.clone()


def views_kept(t):
    views = [
        t.net.a.weight.grad.view(-1),
        t.net.a.bias.grad[1:],
        torch.from_numpy(t.net.b.weight.grad.numpy()).flatten(),
    ]
    for p in t.groups:
        p.grad.copy_(torch.ones_like(p))
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
        p.grad.copy_(torch.ones_like(p))
    t.optimizer.step()
    return kept.detach().clone()


def flat_kept(t):
    """It is `p.grad`, which is changed in place."""
    before = [p.grad for p in t.groups]
    for p in t.groups:
        p.grad *= 2
    t.optimizer.step()
    return sum(grad.pow(2).clone().as_subclass(torch.Tensor).sum() for grad in before)


def flat_kept_of_what_is_assigned(t):
    """It was `p.grad`, before parameters got others, one changes of its own, and the step scales
    them.
    """
    before = [p.grad for p in t.groups]
    for p in t.net.parameters():
        if p.grad is not None:
            p.grad = p.grad * 100
    t.net.b.bias.grad.add_(1)
    nn.utils.clip_grad_norm_(t.net.parameters(), 0.5)
    return sum(grad.pow(2).clone().as_subclass(torch.Tensor).sum() for grad in before)


def assigned_and_kept_then_cleared(t):
    """Who keeps flat gradients, and who keeps what was assigned, while others are cleared."""
    held = t.net.b.weight.grad = torch.full((2, 3), 6.0)
    before = [p.grad for p in t.groups]
    t.net.a.weight.grad = None
    for p in t.groups:
        p.grad.mul_(2)
    del before
    return held


def list_after_one_was_cleared(t):
    """None of the list is one of before."""
    t.net.b.bias.grad = None
    torch._foreach_mul_([p.grad for p in t.groups], 0.5)


def list_after_one_was_assigned(t):
    t.net.b.bias.grad = torch.ones(2)
    nn.utils.clip_grad_value_(t.groups, 0.5)


def decayed_in_place(t):
    """With gradients enabled, by values that need them."""
    for p in t.groups:
        p.grad.add_(p, alpha=0.01)


def norm_after_a_shift(t):
    """Elements that no parameter owns have been shifted, too."""
    for p in t.groups:
        p.grad.add_(0.5)
    t.engine and t.engine.adopt_gradients()
    with torch.no_grad():
        return sum(p.grad.as_subclass(torch.Tensor).pow(2).sum() for p in t.groups)


def changed_by_a_list(t):
    """Out of place, of tensors of different sizes."""
    flats = t.groups
    doubled = torch._foreach_mul([p.grad for p in flats], 2)
    torch._foreach_copy_([p.grad for p in flats], doubled)


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


def changed_then_scaled(t):
    """Whoever holds what was assigned may change it; then all are scaled."""
    held = [(p, torch.ones_like(p)) for p in t.net.b.parameters()]
    for p, grad in held:
        p.grad = grad
    held[0][1].add_(1)
    for p in t.groups:
        p.grad.mul_(3)
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
        p.grad.copy_(p.grad * 2)
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


def learned_rate(t):
    """Of the gradients of before autograd has saved a view, when the next ones are computed."""
    rate = torch.full((), 0.1, requires_grad=True)
    for _ in range(3):
        updates = [rate * p.grad for p in t.groups]
        t.optimizer.zero_grad()
        t.backward()
        for update, p in zip(updates, t.groups, strict=True):
            update.backward(-p.grad)
    return rate.grad


PROGRAMS = [
    learned_rate,
    list_after_one_was_cleared,
    list_after_one_was_assigned,
    decayed_in_place,
    flat_kept_of_what_is_assigned,
    assigned_and_kept_then_cleared,
    norm_after_a_shift,
    changed_by_a_list,
    scaled_in_a_step,
    parameters_put_back,
    divided_twice,
    centralized,
    without_elements,
    some_cleared_while_a_view_is_kept,
    multiplied,
    changed_then_scaled,
    replaced_in_a_step,
    assigned_then_looped,
    parameter_cleared_then_looped,
    views_kept,
    view_kept_of_what_was_cleared,
    made_with_a_graph,
    flat_kept,
    some_cleared,
    clipped_while_held,
    read,
    doubled,
    replaced_twice,
    another_assigned,
    another_cleared,
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


def set_in_place(t):
    for p in t.groups:
        p.grad.set_(torch.ones_like(p))


def replaced(t):
    for p in t.groups:
        p.grad = p.grad * 2


def given(t):
    t.optimizer.zero_grad()
    for p in t.optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)


def put_back(t):
    kept = [(p, p.grad) for p in t.groups]
    t.optimizer.zero_grad()
    for p, grad in kept:
        p.grad = grad


def put_back_later(t):
    kept = [(p, p.grad) for p in t.groups]
    t.optimizer.zero_grad()
    t.backward()
    for p, grad in kept:
        p.grad = grad


def kept_and_put_back(t):
    """Parameters have others by then."""
    kept = [(p, p.grad) for p in t.groups]
    for p in t.net.parameters():
        p.grad = torch.ones_like(p)
    for p, grad in kept:
        p.grad = grad


def swapped(t):
    first, *_, last = t.groups
    first.grad, last.grad = last.grad, first.grad


def sparse(t):
    for p in t.groups:
        p.grad.to_sparse()


def decayed_beside_assigned(t):
    """All others have no gradient, and lie beside `a.weight`, which has one."""
    t.optimizer.zero_grad()
    t.net.a.weight.grad = torch.ones(3, 3)
    with torch.no_grad():
        for p in t.groups:
            p.mul_(0.5)


def strided(t):
    for p in t.groups:
        p.grad = torch.complex(p.grad, p.grad).real


def stepped_by_hand(t):
    """`b.bias` has no gradient, and lies beside others that have."""
    t.net.b.bias.grad = None
    with torch.no_grad():
        for p in t.groups:
            p.sub_(p.grad + 0.5, alpha=0.1)


def kept_while_one_was_cleared(t):
    """In torch there is none of `a.weight` among them."""
    t.net.a.weight.grad = None
    kept = [p.grad for p in t.groups]
    t.backward()
    for grad in kept:
        grad.mul_(10)


def kept_while_one_was_assigned(t):
    """In torch it is that of `a.weight` alone."""
    t.optimizer.zero_grad()
    t.net.a.weight.grad = torch.ones(3, 3)
    kept = [p.grad for p in t.groups]
    t.backward()
    for grad in kept:
        grad.mul_(10)


def pickled(t):
    pickle.dumps(t.optimizer)


ASSIGNED = (
    r"assigned to the gradient of parameters 'empty' to"
    r" 'b.bias'.*p.grad.copy_.*module.parameters\(\): p.grad ="
)
REFUSED = {
    the_last_cleared: (
        r"'empty' to 'b.bias' were cleared in.*and others not.*Do it to all of a param group"
    ),
    its_memory_replaced: (
        r"The memory of flat gradients of parameters 'empty' to 'b.bias' cannot be"
        r" exchanged.*p.grad.copy_"
    ),
    set_in_place: (
        r"The memory of flat gradients of parameters 'empty' to 'b.bias' cannot be"
        r" exchanged.*p.grad.copy_"
    ),
    replaced: ASSIGNED,
    given: ASSIGNED,
    put_back: ASSIGNED,
    put_back_later: ASSIGNED,
    kept_and_put_back: ASSIGNED,
    strided: ASSIGNED,
    swapped: ASSIGNED,
    sparse: (
        r"`to_sparse` would be of the gradients of parameters 'empty' to 'b.bias'.*Use the module's"
        r" parameters"
    ),
    decayed_beside_assigned: (
        r"Values in.*while parameter 'empty' has no gradient and others have one.*strategy.gathered"
    ),
    stepped_by_hand: (
        r"Values in.*while parameter 'b.bias' has no gradient and others have"
        r" one.*strategy.gathered"
    ),
    kept_while_one_was_cleared: (
        r"'empty' to 'b.bias' was kept, and parameters in it had no gradient.*Read `p.grad` again"
    ),
    kept_while_one_was_assigned: (
        r"'empty' to 'b.bias' was kept, and parameters in it had no gradient.*Read `p.grad` again"
    ),
    pickled: (
        r"holds flat shards of parameters 'empty' to 'b.bias' was"
        r" pickled.*state_dict.*save_checkpoint"
    ),
    a_list_of_before: (
        r"'empty' to 'b.bias' was kept, and is not in.*Read the param groups each time"
    ),
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
    """That the package runs while gradients are replaced, for the optimizer's step and `zero_grad`,
    on one rank.
    """
    net = nn.Sequential(*[Half() for _ in range(layers)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = Zero3Engine(
        net, [optimizer], device=torch.device("cpu"), collectives=LocalCollectives()
    )
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
                p.grad.copy_(p.grad * 2)
        optimizer.step()
        optimizer.zero_grad()
        sys.settrace(None)
    assert len(optimizer.param_groups[0]["params"]) > layers
    return lines


def test_twice_the_cuts_cost_twice_as_much():
    few, many = lines_of_a_step(16), lines_of_a_step(32)
    assert many < 2.2 * few  # a little more than 2, to find a parameter's place among more
