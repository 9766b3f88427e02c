"""Views of weights that graphs hold past autograd: right wherever they are on `ctx` or in a
checkpoint.
"""

import functools
import sys
import types
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.contracts import WIDTH, build
from helpers.ranks import run_ranks


class Block(nn.Module):
    """Leaves its result in an attribute: no gradient of an output tells that its backward
    begins.
    """

    function: type[torch.autograd.Function]

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def product(self, x):
        return self.function.apply(x, self.first.weight)

    def forward(self, x):
        self.result = x + self.second(self.product(x))


def block_of(function):
    return type("Block", (Block,), {"function": function})


def alone(block, count):
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(count)])


def run(model, x):
    for block in model:
        out = block(x)
        x = block.result if out is None else out
    return x.square().mean() if x.dim() else x


def worst(block, blocks=5, within=lambda loss, x: None, prepare=lambda model: None):
    """How far gradients of a model of such blocks are from those of plain torch; ``within``: done
    in the step.
    """
    model, _, engine = build(0, 2, block=block, blocks=blocks)
    plain = alone(block, blocks)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = []
    for each in (model, plain):
        prepare(each)
    with engine.step():
        loss = run(model, x)
        found.append(within(loss, x))
    with engine.backward():
        # what it holds is there when the engine looks for kept views
        loss.backward(retain_graph=True)
    loss = run(plain, x)
    found.append(within(loss, x))
    loss.backward()
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    assert [p is None for p, _ in pairs] == [q is None for _, q in pairs]
    differences = [
        ((p - q).abs().max() / q.abs().max()).item() for p, q in [*pairs, found] if q is not None
    ]
    return max(differences)


# ---- a backward inside of a Function's backward
# ---------------------------------------------------


def running(way, distance):
    """A Function whose backward runs another block, and differentiates it, between the read of its
    weight and the use of it.
    """

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, module, other):
            ctx.x, ctx.module, ctx.other = x, module, other
            if way == "attribute":
                ctx.view = weight.t()
            elif way != "module":
                ctx.save_for_backward(weight.t() if way == "saved view" else weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            if way == "module":
                view = ctx.module.first.weight.t()
            else:
                view = ctx.view if way == "attribute" else ctx.saved_tensors[0]
                view = view.t() if way == "saved" else view
            if ctx.other is not None:
                with torch.enable_grad():
                    given = grad.detach().requires_grad_()
                    (more,) = torch.autograd.grad(ctx.other(given).square().sum(), given)
                grad = grad + 0.1 * more
            return grad @ view.t(), grad.t() @ ctx.x, None, None

    class Running(Block):
        other = (None,)

        def forward(self, x):
            if torch._C._current_graph_task_id() != -1:
                return x + self.second(x @ self.first.weight.t())
            return x + self.second(Product.apply(x, self.first.weight, self, self.other[0]))

    def prepare(model):
        model[3].other = (model[3 + distance],)

    return worst(Running, blocks=6, prepare=prepare)


def run_others(rank, world_size):
    return [
        running(way, distance)
        for way in ("attribute", "saved", "saved view", "module")
        for distance in (-2, -1, 2)
    ]


def test_what_was_read_stays_while_a_backward_runs_inside():
    for found in run_ranks(run_others, 2):
        assert max(found) < 1e-5, found


# ---- where the view is ---------------------------------------------------------------------------


@dataclass
class Data:
    view: torch.Tensor


class Slotted:
    __slots__ = ("holder",)

    def __init__(self, holder):
        self.holder = holder


def cyclic(view):
    found = {"view": view}
    found["itself"] = found
    return found


# Name -> what is left on `ctx`, and how backward finds the view in it.
CONTAINERS = {
    "closure": (lambda view: lambda: view, lambda kept: kept()),
    "default": (lambda view: lambda view=view: view, lambda kept: kept()),
    "partial": (lambda view: functools.partial(torch.t, view), lambda kept: kept().t()),
    "method": (lambda view: [view].__getitem__, lambda kept: kept(0)),
    "set": (lambda view: {view}, lambda kept: next(iter(kept))),
    "key": (lambda view: {view: 1}, lambda kept: next(iter(kept))),
    "dataclass": (Data, lambda kept: kept.view),
    "namespace": (lambda view: types.SimpleNamespace(view=view), lambda kept: kept.view),
    "deque": (lambda view: deque([view]), lambda kept: kept[0]),
    "cyclic": (cyclic, lambda kept: kept["itself"]["view"]),
    "nested": (lambda view: defaultdict(list, {1: [(view,)]}), lambda kept: kept[1][0][0]),
    "objects": (lambda view: Slotted(Slotted([view])), lambda kept: kept.holder.holder[0]),
}


def keeping(put, get):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.x, ctx.kept = x, put(weight.t())
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad):
            return grad @ get(ctx.kept).t(), grad.t() @ ctx.x

    return Product


def input_gradient(loss, x):
    return torch.autograd.grad(loss, x)[0]


def in_containers(rank, world_size):
    found = {name: worst(block_of(keeping(*way))) for name, way in CONTAINERS.items()}
    return found


def test_views_are_found_in_what_is_left_on_ctx():
    for found in run_ranks(in_containers, 2, timeout=60):
        assert all(difference < 1e-5 for difference in found.values()), found


def gradient_in_the_step(way):
    """The graph is gone before the step ends."""
    block = block_of(keeping(*way))
    model, _, engine = build(0, 2, block=block, blocks=5)
    plain = alone(block, 5)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with engine.step():
        mine = input_gradient(run(model, x), x)
    torch.testing.assert_close(mine, input_gradient(run(plain, x), x))


def in_steps(rank, world_size):
    gradient_in_the_step(CONTAINERS["namespace"])
    gradient_in_the_step(CONTAINERS["objects"])
    return True


def test_a_graph_that_is_gone_before_the_step_ends():
    assert run_ranks(in_steps, 2) == [True, True]


class InClosure(Block):
    reentrant = False

    def product(self, x):
        view = self.first.weight.t()
        return checkpoint(lambda t: t @ view, x, use_reentrant=self.reentrant)


class InReentrantClosure(InClosure):
    reentrant = True


class InArguments(Block):
    def product(self, x):
        return checkpoint(
            lambda t, views: t @ views.view, x, Data(self.first.weight.t()), use_reentrant=False
        )


class InReentrantArguments(Block):
    def product(self, x):
        return checkpoint(
            lambda t, views: t @ views["view"][0],
            x,
            {"view": [self.first.weight.t()]},
            use_reentrant=True,
        )


class InOptions(Block):
    def product(self, x):
        views = {"views": [self.first.weight.t()]}
        return checkpoint(lambda t, views: t @ views[0], x, use_reentrant=False, **views)


class Assigning(Block):
    """A checkpoint's function leaves the view in its closure, each time that it runs."""

    reentrant = False

    def product(self, x):
        view, views = None, {}

        def run(t):
            nonlocal view
            views["bias"] = self.second.bias[:]
            view = self.first.weight.t()
            return t @ view + views["bias"]

        return checkpoint(run, x, use_reentrant=self.reentrant)


class AssigningReentrant(Assigning):
    reentrant = True


class AssigningAndReturning(Assigning):
    def forward(self, x):
        super().forward(x)
        return self.result


class BesideAnother(Block):
    """The last one's checkpoint runs another unit before it uses its argument."""

    other = ()

    def product(self, x):
        return checkpoint(self.run, x, self.first.weight.t(), use_reentrant=self.reentrant)

    def run(self, x, view):
        for other in self.other:
            x = x + torch.tanh(other.second(x))
        return torch.tanh(x) @ view

    reentrant = False


class BesideAnotherReentrant(BesideAnother):
    reentrant = True


def to_the_last(model):
    model[-1].other = (model[-3],)


def in_checkpoints(rank, world_size):
    ways = [InClosure, InReentrantClosure, InArguments, InReentrantArguments, InOptions]
    ways += [Assigning, AssigningReentrant, AssigningAndReturning]
    found = {way.__name__: worst(way) for way in ways}
    return found | {
        way.__name__: worst(way, prepare=to_the_last)
        for way in (BesideAnother, BesideAnotherReentrant)
    }


def test_views_are_found_in_what_a_checkpoint_runs_again():
    for found in run_ranks(in_checkpoints, 2, timeout=60):
        assert all(difference < 1e-5 for difference in found.values()), found


# ---- what the view is ----------------------------------------------------------------------------


class Inner(torch.autograd.Function):
    """Keeps a graph of its own, and its leaves."""

    @staticmethod
    def forward(ctx, x, weight):
        with torch.enable_grad():
            ctx.leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
            ctx.out = (ctx.leaves[0] @ ctx.leaves[1].t()).sin()
        return ctx.out.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.out.backward(grad)
        return tuple(leaf.grad for leaf in ctx.leaves)


class InnerByGrad(Inner):
    @staticmethod
    def backward(ctx, grad):
        return torch.autograd.grad(ctx.out, ctx.leaves, grad)


class Twice(Block):
    """Keeps what it was given, which has a graph that leads to the weight."""

    function = keeping(lambda view: view, lambda kept: kept)

    def product(self, x):
        return torch.tanh(self.function.apply(x, self.first.weight[:]))


def penalty(loss, x):
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x, retain_graph=True)[0]


def raise_first(fails):
    """A backward that raises, and one of the same graph that does not."""

    def get(kept):
        if fails:
            raise FloatingPointError(fails.pop())
        return kept

    return keeping(lambda view: view, get)


def as_they_were(rank, world_size):
    found = {
        "leaves": worst(block_of(Inner)),
        "by grad": worst(block_of(InnerByGrad)),
        "twice": worst(Twice, within=penalty),
    }
    fails = []

    def fail(loss, x):
        fails.append("once")
        with suppress(FloatingPointError):
            torch.autograd.grad(loss, x, retain_graph=True)

    model, _, engine = build(rank, 2, block=block_of(raise_first(fails)), blocks=5)
    plain, x = alone(block_of(raise_first([])), 5), torch.ones(2, WIDTH, requires_grad=True)
    with engine.step():
        loss = run(model, x)
        fail(loss, x)
    with engine.backward():
        loss.backward()
    run(plain, x).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    return found


def test_views_stay_the_same_tensors_with_their_graphs():
    for found in run_ranks(as_they_were, 2):
        assert all(difference < 1e-5 for difference in found.values()), found


# ---- whose the view is ---------------------------------------------------------------------------


class Shared(Block):
    """Layers put views into one list; ``reads`` says who reads the one of the layer before."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, shared, reads):
            ctx.x, ctx.shared, ctx.number, ctx.reads = x, shared, len(shared), reads
            shared.append(weight.t())
            before = shared[-2] if len(shared) > 1 and reads == "forward" else None
            return x @ weight.t() if before is None else x @ weight.t() + x @ before

        @staticmethod
        def backward(ctx, grad):
            result = grad @ ctx.shared[ctx.number].t()
            if ctx.number and ctx.reads == "backward":
                result = result + grad @ ctx.shared[ctx.number - 1].t()
            return result, grad.t() @ ctx.x, None, None

    reads = ""

    def product(self, x):
        return self.Product.apply(x, self.first.weight, self.shared, self.reads)


class SharedAndReturned(Shared):
    def forward(self, x):
        super().forward(x)
        return self.result


def share(model):
    shared = []
    for block in model:
        block.shared = shared


def in_one_list(rank, world_size):
    ways = [
        (block, reads)
        for block in (Shared, SharedAndReturned)
        for reads in ("", "forward", "backward")
    ]
    return [
        worst(type("Block", (block,), {"reads": reads}), prepare=share) for block, reads in ways
    ]


def test_one_of_another_unit():
    for found in run_ranks(in_one_list, 2, timeout=60):
        assert max(found) < 1e-5, found


class Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, views):
        ctx.views = views
        return x + 1

    @staticmethod
    def backward(ctx, grad):
        return grad + ctx.views[0].sum(), None


def from_before(rank, world_size, distance, detached):
    """A Function is given the view that a layer before kept, whose memory the layer of now may
    have.
    """

    class FromBefore(Block):
        def product(self, x):
            view = self.first.weight.detach().t() if detached else self.first.weight.t()
            if distance:
                self.shared.append(view)
            return Holding.apply(x, self.shared[:-distance][-1:] or [view]) @ self.first.weight.t()

    return worst(FromBefore, prepare=share)


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("distance", [0, 1, 2])
def test_one_that_was_kept_before(distance, detached):
    assert max(run_ranks(from_before, 2, distance, detached)) < 1e-5


class GivingWeight(torch.autograd.Function):
    """The sum of products, whose gradient is the weight itself if that of the sum is 1."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x * weight).sum()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return weight[:], x


class EndingInWeight(Block):
    """The last one's result is a number."""

    last = False

    def forward(self, x):
        if self.last:
            return GivingWeight.apply(x.sum(0), self.first.weight[0])
        return x + self.second(torch.tanh(self.first(x)))


def give_weights(rank, world_size):
    def end(model):
        model[-1].last = True

    return worst(EndingInWeight, prepare=end)


def test_a_gradient_that_is_a_view_of_a_weight():
    assert max(run_ranks(give_weights, 2)) < 1e-5


class Caching(torch.autograd.Function):
    """Its first backward leaves views on `ctx`, and what it has saved; its second reads them."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, weight.detach()[:3])
        ctx.cache = {}
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight, part = ctx.saved_tensors
        view, part = ctx.cache.setdefault("views", (weight[3:], part))
        return grad @ torch.cat([part, view]), grad.t() @ x


def in_backward(rank, world_size):
    models = []

    def twice(loss, x):
        gradient = torch.autograd.grad(loss, x, retain_graph=True)[0]
        with torch.no_grad():
            run(models.pop(0)[:2], x)  # other units take the slots
        return gradient

    class Returned(Block):
        function = Caching

        def forward(self, x):
            super().forward(x)
            return self.result

    return max(
        worst(block, within=twice, prepare=models.append) for block in (block_of(Caching), Returned)
    )


def test_one_that_a_backward_leaves_is_found_by_the_next():
    assert max(run_ranks(in_backward, 2)) < 1e-5


def lines_of_a_call(rank, world_size):
    build(rank, world_size, blocks=1)
    lines, numbers = [], list(range(100_000))
    function = keeping(lambda view: {"numbers": numbers, "names": ("a", "b")}, lambda kept: kept)

    def trace(frame, event, argument):
        lines.append(frame.f_lineno)
        return trace

    sys.settrace(trace)
    try:
        function.apply(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True))
    finally:
        sys.settrace(None)
    return len(lines)


def test_a_long_list_of_numbers_is_not_gone_through():
    assert max(run_ranks(lines_of_a_call, 2)) < 1000
