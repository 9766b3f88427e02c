"""Random programs that read, keep, assign, change and clear gradients, of parameters and in param
groups.
"""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import LocalCollectives, make_collectives
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


class Halving(torch.optim.SGD):
    """Puts other gradients in the place of those that it finds, as long as it is told to."""

    halves = False

    def step(self):
        for group in self.param_groups if self.halves else ():
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad / 2
        super().step()


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
        self.optimizer = Halving([{"params": each} for each in params], lr=0.01, momentum=momentum)
        options = {"device": torch.device("cpu"), "collectives": collectives}
        self.engine = Zero3Engine(net, [self.optimizer], **options) if collectives else None
        self.kept, self.kept_flats, self.held, self.seen = [], [], torch.zeros(1), []

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

    def step(self, halves):
        self.optimizer.halves = halves
        self.optimizer.step()

    def clip(self):
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)

    def owned(self, p, group):
        """1 where an element of ``p`` is one of a parameter."""
        if self.engine is None:
            return torch.ones_like(p)
        (flat,) = (flat for flat in self.engine.groups if flat.key.group == group)
        owned = torch.zeros(flat.numel)
        for entry in flat.owned:
            owned[entry.part.start : entry.part.stop] = 1
        return owned[p.storage_offset() :][: p.numel()]

    def added(self, total):
        """Over the ranks, which have shards."""
        return self.engine.collectives.all_reduce(total) if self.engine else total

    # Gradients of parameters.

    def read(self, name):
        grad = self.net.get_parameter(name).grad
        self.seen.append(None if grad is None else grad.clone())

    def keep(self, name, view):
        if (grad := self.net.get_parameter(name).grad) is not None:
            self.kept.append(grad if view is None else grad.view(-1)[:2] if view else grad.detach())

    def look_at_kept(self):
        self.seen += [grad.clone() for grad in self.kept]

    def write_to_kept(self):
        for grad in self.kept[-1:]:
            grad.add_(0.5)

    def assign(self, name, value):
        self.net.get_parameter(name).grad = torch.full_like(self.net.get_parameter(name), value)

    def assign_and_hold(self, name, value):
        self.held = torch.full_like(self.net.get_parameter(name), value)
        self.net.get_parameter(name).grad = self.held

    def write_to_held(self):
        self.held.add_(1)

    def change(self, name):
        if (grad := self.net.get_parameter(name).grad) is not None:
            grad.mul_(3)

    def clear(self, name):
        self.net.get_parameter(name).grad = None

    def replace_by_what_they_were(self, factor):
        kept = [p.grad for p in self.net.parameters()]
        self.optimizer.zero_grad()
        for p, grad in zip(self.net.parameters(), kept, strict=True):
            p.grad = grad
        if factor and kept[0] is not None:
            kept[0].mul_(factor)

    def clear_layer(self, layer, to_none):
        self.net.get_submodule(layer).zero_grad(set_to_none=to_none)

    def clear_model(self, to_none):
        self.net.zero_grad(set_to_none=to_none)

    # Those in param groups.

    def set(self, group, value):
        for p in self.flats(group):
            p.grad.copy_(torch.full_like(p, value))

    def keep_all(self, group):
        self.kept_flats = [(p.grad, self.owned(p, group)) for p in self.flats(group)]

    def look_at_all_kept(self):
        total = sum(
            (grad.pow(2) * owned).as_subclass(torch.Tensor).sum() for grad, owned in self.kept_flats
        )
        self.seen.append(self.added(torch.as_tensor(total)))

    def write_to_all_kept(self):
        for grad, _ in self.kept_flats:
            grad.add_(0.5)

    def scale(self, group):
        for p in self.flats(group):
            p.grad.mul_(2)

    def shift(self, group):
        for p in self.flats(group):
            p.grad.add_(1)

    def multiply(self, group):
        for p in self.flats(group):
            p.grad *= 2

    def shift_and_clip(self, group):
        """What no parameter owns is shifted, too, and is no part of the norm."""
        for p in self.flats(group):
            p.grad.add_(0.1)
        if self.engine:
            self.engine.adopt_gradients()
        with torch._C.DisableTorchFunctionSubclass():
            flats = [
                p.grad for p in self.optimizer.param_groups[group]["params"] if p.grad is not None
            ]
            norm = self.added(sum((grad.pow(2).sum() for grad in flats), torch.zeros(()))).sqrt()
        for p in self.flats(group):
            p.grad.mul_(0.5 / (norm + 1e-6))

    def take_away(self, group):
        for p in self.optimizer.param_groups[group]["params"]:
            p.grad = None

    def clear_optimizer(self, to_none):
        self.optimizer.zero_grad(set_to_none=to_none)


def write(rng, groups, world_size):
    """A program: names of methods, with arguments. On several ranks without what the guide tells to
    be different there.
    """
    a_name, a_flag, a_value = (
        lambda: rng.choice(NAMES),
        lambda: rng.random() < 0.5,
        lambda: rng.randint(1, 9),
    )
    of_a_group = "scale", "shift", "multiply", "shift_and_clip", "take_away"
    arguments = {
        **dict.fromkeys(("clip", "look_at_kept", "write_to_kept", "write_to_held"), ()),
        "step": (a_flag,),
        "replace_by_what_they_were": (lambda: rng.choice([0, 3]),),
        "backward": (lambda: rng.random() < 0.25,),
        "read": (a_name,),
        "keep": (a_name, lambda: rng.choice([None, False, True])),
        "assign": (a_name, a_value),
        "assign_and_hold": (a_name, a_value),
        "change": (a_name,),
        "clear": (a_name,),
        "clear_layer": (lambda: rng.choice("abc"), a_flag),
        "clear_model": (a_flag,),
        "clear_optimizer": (a_flag,),
        **dict.fromkeys(of_a_group, (lambda: rng.randrange(groups),)),
        "set": (lambda: rng.randrange(groups), a_value),
    }
    if (
        rng.random() < 0.3
        # of parameters nothing is kept or assigned: else flat gradients that are kept refuse to be
        # used
    ):
        for name in [
            name
            for name in arguments
            if name.startswith(("assign", "write", "change", "clear_", "replace"))
        ]:
            del arguments[name]
        del arguments["clear"]
        arguments |= {"clear_optimizer": (a_flag,), "look_at_all_kept": (), "write_to_all_kept": ()}
        arguments |= {"keep_all": (lambda: rng.randrange(groups),)}
    program, flat, held, lost = [("backward", False)], False, False, False
    for _ in range(rng.randint(3, 10)):
        name = rng.choice(list(arguments))
        call = name, *(argument() for argument in arguments[name])
        if world_size > 1:
            flat = name != "backward" and (
                flat or name in (*of_a_group, "set", "clear_optimizer", "write_to_all_kept")
            )
            lost |= flat and (
                name in ("take_away", "assign") or name.startswith(("clear", "replace"))
            )
            if lost and name in ("look_at_kept", "write_to_kept"):
                # refused: changed in param groups, and then cleared or replaced, before these had
                # followed
                continue
            if flat and name in ("look_at_kept", "write_to_kept", "write_to_held"):
                continue  # these show it when the next backward ends
            held = name == "assign_and_hold" or (held and name != "replace_by_what_they_were")
            if name == "write_to_held" and not held:
                continue  # `p.grad` was another tensor with the same values
        program.append(call)
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
        program, momentum = write(rng, groups, world_size), rng.choice([0, 0.9])
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
