"""Tensors that autograd saves under hooks of the user's, and of classes of the user's; and two
engines at once.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from helpers.contracts import WIDTH, Block, build
from helpers.ranks import run_ranks
from lightning_zero3.strategies.engine import ResidencyError, Zero3Engine, saved_tensors
from lightning_zero3.strategies.residency.functions import name_of


class Times(torch.autograd.Function):
    """Saves a parameter itself, which rests."""

    @staticmethod
    def forward(ctx, x, parameter):
        ctx.save_for_backward(parameter)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (parameter,) = ctx.saved_tensors
        return grad * parameter.sum(), None


def as_it_is(tensor):
    return tensor


def gradient(model, step, backward, pack=as_it_is):
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).requires_grad_()
    with step():
        y = model(x)
        with saved_tensors_hooks(pack, as_it_is):
            loss = Times.apply(y, model[0].first.weight).square().mean()
    with backward():
        loss.backward()
    return x.grad


def built(rank, world_size):
    """A model with its engine, and the gradient that it is to have."""
    model, _, engine = build(rank, world_size)
    torch.manual_seed(0)
    alone = nn.Sequential(*[Block() for _ in range(len(model))])
    return model, engine, gradient(alone, nullcontext, nullcontext)


def two_engines(rank, world_size, again):
    """Of two models, or (``again``) of one, whose parameters the second has taken over."""
    model, first, expected = built(rank, world_size)
    if again:
        second = Zero3Engine(
            model, device=first.device, collectives=first.collectives, unit_policy=[Block]
        )
        pairs = [(model, second)]
    else:
        other, second, _ = built(rank, world_size)
        pairs = [(model, first), (other, second)]
    for order in ((first, second), (second, first)):
        # a set, whose order is another one on each rank
        saved_tensors.WATCHING = [engine._saved for engine in order]
        for each, engine in pairs:
            torch.testing.assert_close(gradient(each, engine.step, engine.backward), expected)
    if not again:
        told = r"'0\.first\.weight' is sharded over the ranks and was read outside a step"
        with pytest.raises(ResidencyError, match=told), first.step():
            Times.apply(torch.ones(2, requires_grad=True), other[0].first.weight)
    return True


@pytest.mark.parametrize("again", [False, True])
def test_of_two_engines_each_knows_its_own(again):
    assert run_ranks(two_engines, 2, again) == [True, True]


class Nameless:
    """A hook that was made where there is no module: by `exec`, or by a compiler."""

    __module__ = None

    def __call__(self, tensor):
        return tensor


def nameless(rank, world_size):
    model, engine, expected = built(rank, world_size)
    torch.testing.assert_close(gradient(model, engine.step, engine.backward, Nameless()), expected)
    return True


def test_hooks_of_no_module():
    assert run_ranks(nameless, 2) == [True, True]


class Secretive(torch.Tensor):
    """Tells nobody where it lies."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if name_of(func) in ("data_ptr", "untyped_storage", "_base.__get__"):
            raise TypeError(f"asked for {func}")
        return super().__torch_function__(func, types, args, kwargs or {})


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = [torch.ones(1).as_subclass(Secretive)]
        ctx.save_for_backward(*ctx.kept)
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * (ctx.kept[0] * ctx.saved_tensors[0]).as_subclass(torch.Tensor)


class Telling(Block):
    """Beside its output there is a tensor of such a class: in what it returns, on a `ctx`, saved,
    as an array.
    """

    def forward(self, x):
        x = super().forward(Keeping.apply(x[0] if isinstance(x, tuple) else x))
        beside = torch.ones(2).as_subclass(Secretive)
        assert beside.numpy().sum() == 2
        with saved_tensors_hooks(as_it_is, as_it_is):
            return Keeping.apply(x), beside


def secretive(rank, world_size):
    model, _, engine = build(rank, world_size, block=Telling)
    torch.manual_seed(0)
    alone = nn.Sequential(*[Telling() for _ in range(len(model))])
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    with engine.step():
        loss = model(x)[0].square().mean()
    with engine.backward():
        loss.backward()
    alone(x)[0].square().mean().backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    return True


def test_tensors_of_users_classes_are_not_asked_where_they_lie():
    assert run_ranks(secretive, 2) == [True, True]
