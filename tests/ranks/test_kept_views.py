"""Views of weights that outlive their unit's use, and arrays of weights: read as in plain torch, or
an error.
"""

import gc
import re
from collections import namedtuple
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers.contracts import IN_THE_SLOTS, ON_THE_WIRE, WIDTH, Block, build, micro_batch
from helpers.ranks import run_ranks
from lightning_zero3.strategies.engine import gathered


class Recomputed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Kept(Block):
    def forward(self, x):
        self.kept = self.first.bias[:3]
        return super().forward(x)


VARIANTS = {
    "plain": {},
    "bf16 on the wire": ON_THE_WIRE,
    "bf16 in the slots": IN_THE_SLOTS,
    "recomputed": {"block": Recomputed},
    "reduced once": {"reduce_once": True},
    "debug": {"debug": True},
}


def count_looks():
    """A list that has one item for each generation of objects that was looked through, and for each
    collection.
    """
    from lightning_zero3.strategies.engine import kept_views

    looks = []
    kept_views.gc = SimpleNamespace(
        get_objects=lambda of: looks.append(of) or gc.get_objects(of),
        collect=lambda: looks.append("all") or gc.collect(),
    )
    return looks


def count_searches(rank, world_size, variant):
    model, optimizer, engine = build(rank, world_size, **VARIANTS[variant])
    searches = count_looks()
    for step in range(4):
        with engine.accumulate():
            micro_batch(model, engine, rank, 2 * step)
        micro_batch(model, engine, rank, 2 * step + 1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), engine.step():
            model(torch.ones(2, WIDTH))
    ordinary = len(searches)
    kept_view = engine.units[0].chunks[0].slot[:8]
    with torch.no_grad(), engine.step():
        model(torch.ones(2, WIDTH))
    del kept_view
    return ordinary, len(searches) > ordinary


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_ordinary_training_nobody_looks_for_them(variant):
    assert run_ranks(count_searches, 2, variant) == [(0, True)] * 2


def keep_in_evaluation(rank, world_size):
    model, _, engine = build(rank, world_size, block=Kept)
    with torch.no_grad(), engine.step():
        model(torch.ones(2, WIDTH))
    told = r"A view \(shape \(3,\)\) of parameter '0.first.bias' \(unit 0\) was kept"
    kept, uses = (
        model[0].kept,
        [lambda view: view + 1, lambda view: view.tolist(), lambda view: view.zero_()],
    )
    for use in (
        *uses,
        lambda view: view.data,
        lambda view: view.data_ptr(),
        lambda view: torch.ones(3).copy_(view),
    ):
        with pytest.raises(RuntimeError, match=told):
            use(kept)
    assert "RestingView" in repr(kept) and kept.shape == (3,)
    micro_batch(model, engine, rank, 0)
    with torch.no_grad(), engine.step():
        for use in (
            lambda view: view.zero_(),
            lambda view: view.data,
            lambda view: torch.add(view, 1, out=view),
        ):
            with pytest.raises(RuntimeError, match=told):
                use(kept)
    return True


def test_one_that_an_evaluation_keeps_cannot_be_read_outside_of_a_step():
    assert run_ranks(keep_in_evaluation, 2) == [True, True]


def read_later(rank, world_size):
    """Views that the first step leaves, read in the next ones: they follow their weights, as in
    plain torch.
    """
    model, optimizer, engine = build(rank, world_size, block=Kept)
    torch.manual_seed(0)
    alone = nn.Sequential(*[Kept() for _ in range(len(model))])
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    kept = {}
    for step in range(3):
        losses = {}
        for each in (model, alone):
            with engine.step() if each is model else nullcontext():
                loss = each(torch.full((2, WIDTH), float(step))).square().mean()
                views = kept.setdefault(each, [block.kept for block in each])
                losses[each] = loss + sum(view.square().sum() * view.mean() for view in views)
                parts = torch.stack([view[1:].detach() for view in views])  # views of views
            kept[each, step] = parts
        assert torch.equal(kept[model, step], kept[alone, step])
        with engine.backward():
            losses[model].backward(retain_graph=True)
        losses[alone].backward(retain_graph=True)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    return True


def test_one_that_is_read_in_later_steps_follows_its_weight():
    assert run_ranks(read_later, 2) == [True, True]


def transposed(weight):
    return weight.t()


def detached(weight):
    return weight.detach()


def by_data(weight):
    return weight.t().data


def copied(weight):
    return weight.t().clone()


def emptied(weight):
    return weight.detach()[:0]


def pass_on(rank, world_size, make):
    """The first layer leaves something to the last, which uses and drops it: autograd saves nothing
    of it, and nobody keeps it.

    Beside a graph that ends in the layer's forward, so that fewer tensors view the weight than were
    saved.
    """
    model, _, engine = build(rank, world_size)
    torch.manual_seed(0)
    alone = nn.Sequential(*[Block() for _ in range(len(model))])
    losses = []
    for each in (model, alone):
        cache, x = {}, torch.ones(2, WIDTH)

        def leave(module, args, cache=cache):
            cache["weight"] = make(module.first.weight)
            (module.first.weight.square().mean() * 2).item()

        each[0].register_forward_pre_hook(leave)
        with engine.step() if each is model else nullcontext():
            for layer in each:
                x = layer(x)
            losses.append((x + cache.pop("weight")[:2, :WIDTH].sum()).square().sum())
    torch.testing.assert_close(*losses)
    with engine.backward():
        losses[0].backward()
    losses[1].backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    return True


@pytest.mark.parametrize("make", [transposed, detached, by_data, copied, emptied])
def test_one_that_another_layer_reads(make):
    assert run_ranks(pass_on, 2, make) == [True, True]


class Returning(Block):
    def forward(self, x):
        return (
            super().forward(x),
            [self.first.bias[:3], {"same": self.first.bias[:3]}],
            self.first.bias,
        )


def return_views(rank, world_size):
    model, _, engine = build(rank, world_size, block=Returning, blocks=2)
    looks, collected = count_looks(), []
    model[0].register_forward_pre_hook(
        lambda module, args: collected.append(module.first.bias.detach()[:3])
    )
    with engine.step():
        _, (first, second), bias = model[0](torch.ones(2, WIDTH))
        searched = len(looks)
        third = collected.pop() + 0
        model[1](torch.ones(2, WIDTH))
    with gathered(bias, modify=False):
        assert all(torch.equal(each, bias[:3]) for each in (first, second["same"], third))
    return searched > 0, len(looks) - searched


def test_what_a_layer_returns_is_not_looked_for():
    assert run_ranks(return_views, 2) == [(True, 0)] * 2


class Empty(Block):
    """Parts without elements, which autograd and a context keep."""

    def forward(self, x):
        x = super().forward(x) + (x[:, :0] * self.first.weight[0, :0]).sum()
        return Function.apply(x, self.first.weight)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.part = weight[:0]
        return x + ctx.part.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad + ctx.part.sum(), None


class ByArray(Block):
    """Memory of a weight that came by way of numpy, in a storage that is none of the engine's."""

    def forward(self, x):
        return super().forward(x * torch.from_numpy(self.first.bias.detach().numpy())[:WIDTH])


class Jagged(Block):
    """A nested tensor that is made of a weight."""

    def forward(self, x):
        nested = torch.nested.nested_tensor_from_jagged(
            self.first.weight, torch.tensor([0, 2, len(self.first.weight)])
        )
        return super().forward(x + 0.01 * (torch.tanh(2 * nested) * nested).values().mean(0))


@pytest.mark.parametrize("block", [Empty, ByArray, Jagged])
def test_what_autograd_saves_in_other_ways_may_stay(block):
    for looks in run_ranks(keep_in_graphs, 2, block):
        assert looks <= (8 if block is not Empty else 60), "few"


def keep_graph(rank, world_size):
    """Two forwards in steps of their own, and one backward of both, beside one rank's whole
    model.
    """
    model, optimizer, engine = build(rank, world_size)
    torch.manual_seed(0)
    alone = nn.Sequential(*[Block() for _ in range(len(model))])
    losses, expected = [], []
    for seed in range(2):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
        with engine.step():
            losses.append(model(x).square().mean())
        expected.append(alone(x).square().mean())
    with engine.backward():
        sum(losses).backward()
    sum(expected).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    return True


def test_a_graph_that_is_kept_until_a_later_step_is_right():
    assert run_ranks(keep_graph, 2) == [True, True]


class Doubled(torch.autograd.Function):
    """Keeps views of a weight as long as its graph lives."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.views = [weight, weight[:1]]
        return x * ctx.views[1].sum()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.views[1].sum(), None


class OfFunction(Block):
    def forward(self, x):
        return super().forward(Doubled.apply(x, self.first.bias))


class InClosure(Block):
    """A checkpoint whose function finds the view in its closure."""

    reentrant = False

    def forward(self, x):
        weight, bias = self.first.weight[:WIDTH], self.first.bias[:WIDTH]
        views = {"bias": [bias]}
        return super().forward(
            checkpoint(lambda t: t @ weight.t() + views["bias"][0], x, use_reentrant=self.reentrant)
        )


class InReentrantClosure(InClosure):
    reentrant = True


def keep_in_graphs(rank, world_size, block):
    """Losses of two graphs, one of which lives while the other is differentiated, beside plain
    torch.
    """
    gc.disable()  # nobody else frees their cycles
    model, optimizer, engine = build(rank, world_size, block=block)
    torch.manual_seed(0)
    alone = nn.Sequential(*[block() for _ in range(len(model))])
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    looks = count_looks()
    for step in range(4):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with engine.step():
            losses = [model(x).square().mean(), model(2 * x).mean()]
        for loss in losses:
            with engine.backward():
                loss.backward()
        (alone(x).square().mean() + alone(2 * x).mean()).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    with gathered(model, modify=False):
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach())
    return len(looks)


@pytest.mark.parametrize("block", [OfFunction, InClosure, InReentrantClosure])
def test_what_a_graph_holds_may_stay(block):
    for looks in run_ranks(keep_in_graphs, 2, block):
        assert looks == 48, (
            "of three units, in two forwards and (two of them, as the other's run first) their"
            " backward"
        )


class InACycle(Block):
    """Nobody is told of a parameter that is a view, and nobody but the garbage collector finds that
    it is not held.
    """

    def forward(self, x):
        box = SimpleNamespace(
            view=nn.Parameter(self.first.weight[:2].detach(), requires_grad=False)
        )
        box.itself = box
        return super().forward(x)


def test_garbage_is_looked_for_where_nobody_collects():
    """`CUDAGraphStep` looks at steps without collection, and the watch reads frames so."""
    run_ranks(keep_in_graphs, 2, InACycle)


def test_two_losses_are_not_looked_through():
    assert run_ranks(keep_in_graphs, 2, Block) == [0, 0]


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        x = torch.relu(self.first(x))
        return self.second(x), self.third(x)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.two = TwoOutputs()

    def forward(self, x):
        return checkpoint(self.two, x, use_reentrant=False)


def recompute_for_each(rank, world_size):
    """What the first backward recomputes, and does not read, stays in the checkpoint."""
    model, _, engine = build(rank, world_size, block=Branching, blocks=1)
    torch.manual_seed(0)
    alone = Branching()
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).requires_grad_()
    with engine.step():
        outputs = model[0](x)
    for stays, output in zip((True, False), outputs, strict=True):
        with engine.backward():
            output.square().mean().backward(retain_graph=stays)
    sum(output.square().mean() for output in alone(x)).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    return True


def test_what_a_checkpoint_recomputed_may_stay():
    assert run_ranks(recompute_for_each, 2) == [True, True]


def keep_beside_graph(rank, world_size, way):
    """Kept in the second step, beside what graphs hold, and read after it."""
    model, optimizer, engine = build(rank, world_size)
    kept = []

    def keep(module, args):
        view = module.first.bias[:3]
        kept.append((number * view for number in range(3)) if way == "generator" else view)
        if way == "shared with a graph":
            return (Doubled.apply(args[0], view),)

    for step in range(2):
        x = torch.ones(2, WIDTH, requires_grad=True)
        with engine.step(), model[1].register_forward_pre_hook(keep) if step else nullcontext():
            losses = [model(x).square().mean(), model(2 * x).mean()]
        for loss in losses:
            with engine.backward():
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with gathered(model, modify=False):
        expected = model[1].first.bias[:3].clone()
    with torch.no_grad(), engine.step():
        found = next(kept[-1]) if way == "generator" else kept[-1]
        assert torch.equal(found, 0 * expected if way == "generator" else expected)
    with pytest.raises(
        RuntimeError,
        match=r"A view \(shape \(3,\)\) of parameter '1.first.bias' \(unit 1\) was kept",
    ):
        next(kept[0]) if way == "generator" else kept[0].sum()
    return True


@pytest.mark.parametrize("way", ["list", "generator", "shared with a graph"])
def test_one_that_is_kept_beside_graphs_is_read_in_steps_only(way):
    assert run_ranks(keep_beside_graph, 2, way) == [True, True]


class Raising(Block):
    def forward(self, x):
        view = self.first.weight.t()
        if x.isnan().any():
            raise FloatingPointError(f"of {len(view)} rows")
        return super().forward(x)


def keep_traceback(rank, world_size):
    model, _, engine = build(rank, world_size, block=Raising)
    with pytest.raises(FloatingPointError) as held, engine.step():
        model(torch.full((2, WIDTH), torch.nan))
    micro_batch(model, engine, rank, 0)
    return str(held.value)


def test_a_traceback_that_is_kept_may_hold_some():
    assert run_ranks(keep_traceback, 2) == [f"of {WIDTH} rows"] * 2


class KeptBoth(Block):
    """Keeps a vector and a matrix of its weights."""

    def forward(self, x):
        self.kept, self.matrix = self.first.bias[:WIDTH], self.first.weight[:WIDTH].t()
        return super().forward(x)


class Own(torch.Tensor):
    """A class of the user's."""


Pair = namedtuple("Pair", "first second")


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, view):
        ctx.save_for_backward(x, view)
        return x * view

    @staticmethod
    def backward(ctx, grad):
        x, view = ctx.saved_tensors
        return grad * view, grad * x


class Giving(torch.autograd.Function):
    """The sum of products, if that of its gradient is 1: two outputs' gradients are views, and flow
    into other operations.
    """

    @staticmethod
    def forward(ctx, x, y, weight):
        ctx.save_for_backward(weight)
        return (x * weight).sum() + (y * weight).sum()

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return weight[:], weight[None], None


def by_hook(x, gradient):
    y = x.sum(0) * 2
    y.register_hook(lambda grad: gradient)
    return y * x


def by_module_hook(x, gradient, pre):
    module = nn.Identity()
    if pre:
        module.register_full_backward_pre_hook(lambda *_: (gradient,))
    else:
        module.register_full_backward_hook(lambda *_: (gradient,))
    return module(torch.tanh(x.sum(0)) * 2) * x


def by_checkpoint(x, view, reentrant):
    return checkpoint(lambda x, view: torch.tanh(x) * view, x, view, use_reentrant=reentrant)


# What a step does with views that earlier layers have kept: x [2, WIDTH], the vectors, the
# matrices, a model.
USES = {
    "beside a copy": lambda x, v, m, model: (
        x * v[0] + model[1].second.weight.detach()[:2, :WIDTH] * v[2]
    ),
    "matrix beside a parameter": lambda x, v, m, model: nn.functional.linear(
        x, m[0], model[1].second.bias[:WIDTH]
    ),
    "two": lambda x, v, m, model: nn.functional.linear(x, m[0], v[1]) @ m[2],
    "named tuple": lambda x, v, m, model: x * torch.stack(Pair(v[0], v[1])),
    "saved": lambda x, v, m, model: Saving.apply(x, v[0]) + Saving.apply(x, v[1]),
    "checkpoint": lambda x, v, m, model: by_checkpoint(x, v[0], False) @ m[1],
    "checkpoint, re-entrant": lambda x, v, m, model: by_checkpoint(x, v[0], True) @ m[1],
    "gradient by it": lambda x, v, m, model: (
        torch.autograd.grad((x * v[0]).square().sum(), v[0], create_graph=True)[0] * x / 100
    ),
    "gradient given": lambda x, v, m, model: torch.autograd.grad(
        (x * x).sum(0), x, v[0], create_graph=True
    )[0],
    "given by a Function": lambda x, v, m, model: (
        Giving.apply(torch.tanh(x[0] * 2) * x[1], x[:1] * 3, v[0]) + 0 * x
    ),
    "given by a hook": lambda x, v, m, model: by_hook(torch.tanh(x @ m[1]), v[0]),
    "parameter given by a hook": lambda x, v, m, model: by_hook(
        torch.tanh(x @ m[1]), model[1].second.bias
    ),
    "given by a module's hook": lambda x, v, m, model: by_module_hook(
        torch.tanh(x @ m[1]), v[0], pre=False
    ),
    "given by a module's pre-hook": lambda x, v, m, model: by_module_hook(
        torch.tanh(x @ m[1]), v[0], pre=True
    ),
    "of a class": lambda x, v, m, model: x * v[0].as_subclass(Own),
    "tensor": lambda x, v, m, model: (
        x * torch.tensor([v[0][0], v[0][1]]).sum() + torch.as_tensor(v[1].detach())
    ),
    "nested": lambda x, v, m, model: (
        x * torch.nested.nested_tensor([v[0].detach(), v[1].detach()])[1]
    ),
    "vmap": lambda x, v, m, model: (
        torch.vmap(lambda row: row * v[0])(x) * torch.vmap(lambda one: one * 2)(v[1])
    ),
    "loops": lambda x, v, m, model: x * sum(one for one in v[0]) + float(v[1].sum()),
}


def use_kept(rank, world_size, names):
    """How far losses and gradients are from those of plain torch."""
    found = {}
    for name in names:
        model, optimizer, engine = build(rank, world_size, block=KeptBoth)
        torch.manual_seed(0)
        alone = nn.Sequential(*[KeptBoth() for _ in range(len(model))])
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        worst = 0.0
        for step in range(2):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step))
            losses = []
            for each in (model, alone):
                with engine.step() if each is model else nullcontext():
                    out = each(x.clone().requires_grad_()) + x
                    out = USES[name](out, [b.kept for b in each], [b.matrix for b in each], each)
                    losses.append(
                        torch.as_tensor(out).square().mean()
                        if name != "given by a Function"
                        else out.mean()
                    )
            with engine.backward():
                losses[0].backward()
            losses[1].backward()
            pairs = [
                (p.grad, q.grad)
                for p, q in zip(model.parameters(), alone.parameters(), strict=True)
            ] + [losses]
            assert [p is None for p, _ in pairs] == [q is None for _, q in pairs]
            worst = max([worst, *((p - q).abs().max().item() for p, q in pairs if q is not None)])
            for each in (optimizer, plain):
                each.step()
                each.zero_grad()
        found[name] = worst
    return found


def test_uses_of_kept_views_are_those_of_plain_torch():
    for found in run_ranks(use_kept, 2, tuple(USES)):
        assert {name: difference for name, difference in found.items() if difference > 1e-5} == {}


def refuse_uses(rank, world_size):
    model, _, engine = build(rank, world_size, block=KeptBoth)
    with torch.no_grad(), engine.step():
        model(torch.ones(2, WIDTH))
        view = model[0].kept
        assert (view.element_size(), view.nbytes, view.is_pinned()) == (4, 4 * WIDTH, False)
        uses = [
            lambda: torch.Tensor(view),
            lambda: setattr(torch.empty(0), "data", view),
            lambda: setattr(view, "real", torch.ones(WIDTH)),
            lambda: view.as_strided((2,), (1,)),
            lambda: view.add_(1),
            lambda: view.untyped_storage(),
        ]
        for use in uses:
            with pytest.raises(
                RuntimeError, match=r"A view .* of parameter '0.first.bias' .* was kept.*clone"
            ):
                use()
    engine.close()
    with pytest.raises(RuntimeError, match="was kept longer than its model, or than the run"):
        view + 1
    return True


def test_what_would_write_to_a_kept_view_or_take_its_memory_is_an_error():
    assert run_ranks(refuse_uses, 2) == [True, True]


class Replaced(Block):
    """Gives a kept view other memory, and keeps what nobody could keep from being read."""

    def forward(self, x):
        if hasattr(self, "kept"):
            self.kept.data = torch.zeros(3)
            self.other = nn.Parameter(self.first.bias.detach()[3:6])
        self.kept = getattr(self, "kept", self.first.bias.detach()[:3])
        return super().forward(x)


class ReturnedAndKept(Block):
    def forward(self, x):
        self.kept = self.first.bias.detach()[:WIDTH].as_subclass(Own)
        return super().forward(x) + 0 * self.kept[:1], self.kept


def keep_more(rank, world_size):
    model, _, engine = build(rank, world_size, block=Replaced)
    with torch.no_grad(), engine.step():
        model(torch.ones(2, WIDTH))
    with (
        pytest.raises(RuntimeError, match="Memory of unit 0 .* was kept"),
        torch.no_grad(),
        engine.step(),
    ):
        model(torch.ones(2, WIDTH))
    assert torch.equal(model[0].kept, torch.zeros(3))
    model, _, engine = build(rank, world_size, block=ReturnedAndKept)
    with torch.no_grad(), engine.step():
        x, given = torch.ones(2, WIDTH), []
        for block in model:
            x, kept = block(x)
            given.append(kept)
        for block, kept in zip(model, given, strict=True):
            assert type(kept) is Own and torch.equal(block.kept + 0, kept)
    return True


def test_who_is_known_hides_nobody_else():
    assert run_ranks(keep_more, 2) == [True, True]


class NestedOfWeight(Block):
    keep = False

    def forward(self, x):
        nested = torch.nested.nested_tensor_from_jagged(
            self.first.weight.detach(), torch.tensor([0, 2, len(self.first.weight)])
        )
        if self.keep:
            self.kept = nested
        return super().forward(x), None if self.keep else nested


def nest(rank, world_size):
    model, _, engine = build(rank, world_size, block=NestedOfWeight)
    with torch.no_grad(), engine.step():
        found = [block(torch.ones(2, WIDTH))[1] for block in model]
        values = [nested.values().clone() for nested in found]
    with gathered(model, modify=False):
        assert all(
            torch.equal(block.first.weight, value)
            for block, value in zip(model, values, strict=True)
        )
    model[0].keep = True
    with (
        pytest.raises(
            RuntimeError, match="'0.first.weight'.* was kept .* is a part of a NestedTensor"
        ),
        engine.step(),
    ):
        model[0](torch.ones(2, WIDTH))
    return True


def test_nested_tensors_of_a_weight_are_copied_if_returned_and_an_error_if_kept():
    assert run_ranks(nest, 2) == [True, True]


class KeptInBackward(Block):
    def forward(self, x):
        x = (x + 1).requires_grad_()
        x.register_hook(lambda grad: setattr(self, "kept", self.first.bias[:3]))
        return super().forward(x)


def keep_in_backward(rank, world_size):
    model, _, engine = build(rank, world_size, block=KeptInBackward)
    micro_batch(model, engine, rank, 0)
    with gathered(model, modify=False):
        expected = [block.first.bias[:3].clone() for block in model]
    with torch.no_grad(), engine.step():
        assert all(
            torch.equal(block.kept, value) for block, value in zip(model, expected, strict=True)
        )
    for block in model:
        with pytest.raises(
            RuntimeError, match=r"A view .* of parameter '.*.first.bias' .* was kept"
        ):
            block.kept + 1
    return True


def test_one_that_a_backward_keeps_is_read_in_steps_only():
    assert run_ranks(keep_in_backward, 2) == [True, True]


class Stateful(Block):
    def keep(self, of):
        raise NotImplementedError

    def forward(self, x):
        self.kept = self.keep(self.first.weight.detach())
        return super().forward(x)


class KeptArray(Stateful):
    def keep(self, of):
        return of.numpy()[:2]


class KeptStorage(Stateful):
    def keep(self, of):
        return torch._C.TensorBase.untyped_storage(of)  # past Python


class KeptSparse(Stateful):
    def keep(self, of):
        return torch.sparse_csr_tensor(
            torch.tensor([0, 2]), torch.tensor([0, 1]), of[0, :2], (1, 2), check_invariants=True
        )


class KeptParameter(Stateful):
    def keep(self, of):
        return [nn.Parameter(of)]


def keep_otherwise(rank, world_size, block):
    model, optimizer, engine = build(rank, world_size, block=block)
    with pytest.raises(RuntimeError) as raised:
        micro_batch(model, engine, rank, 0)
    told = str(raised.value)
    del raised, model[0].kept
    model[0].keep = torch.Tensor.clone
    for block in model:
        block.keep = torch.Tensor.clone
    micro_batch(model, engine, rank, 0)
    return told


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (KeptArray, r"parameter '0.first.weight' \(unit 0\) was kept .* is an array .*clone"),
        (KeptStorage, "Memory of unit 0 .*'0.first.weight'.* was kept .*clone"),
        (
            KeptSparse,
            r"parameter '0.first.weight' \(unit 0\) was kept .* is a part of a Tensor.*clone",
        ),
        (KeptParameter, "Memory of unit 0 .*'0.first.weight'.* was kept .*clone"),
    ],
)
def test_what_nobody_could_be_kept_from_reading_is_an_error_at_once(block, message):
    for told in run_ranks(keep_otherwise, 2, block):
        assert re.search(message, told), told


def write_to_arrays(rank, world_size, options):
    """Values that a forward wrote to an array of a weight: of the model, and of a copy in plain
    torch.
    """
    model, _, engine = build(rank, world_size, **options)
    torch.manual_seed(0)
    alone = nn.Sequential(*[Block() for _ in range(len(model))])

    def write(module, args):
        weight = module.first.weight.detach().numpy()  # also looked at, and left alone
        if rank == 0:  # a write would have to be the same on all ranks
            print(
                module.second.weight.detach().numpy(), module.second.weight[:, 1].detach().numpy()
            )
        module.first.bias.detach().numpy()[5:7] = weight[0, 0] + 2.0

    with torch.no_grad(), gathered(model, modify=True):
        model[1].second.weight[0, 0] = alone[1].second.weight[0, 0] = torch.nan
    for blocks in (model, alone):
        blocks[1].register_forward_pre_hook(write)
        blocks[2].register_forward_pre_hook(
            lambda module, args: print(module.second.weight.detach().numpy().sum())
        )
    alone(torch.ones(2, WIDTH))
    micro_batch(model, engine, rank, 0)
    with gathered(model, modify=False):
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                mine.detach(), theirs.detach(), rtol=0, atol=0, equal_nan=True
            )
    with gathered(model, modify=True):
        if rank == 0:
            model[1].first.bias.detach().numpy()[:] = 3.0
    with gathered(model[1].first.bias, modify=False):
        return sum((u.in_arrays for u in engine.units), []), model[1].first.bias.sum().item()


@pytest.mark.parametrize("options", [{}, {"debug": True}], ids=["plain", "debug"])
def test_what_is_written_to_an_array_of_a_weight_is_stored(options):
    assert run_ranks(write_to_arrays, 2, options) == [([], 3.0 * 4 * WIDTH)] * 2


class Scaled(nn.Sequential):
    """With a weight of its own, in use during the whole step."""

    def __init__(self):
        super().__init__(Block(), Block())
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(x) * self.scale


class Remembering(Scaled):
    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(WIDTH))

    def forward(self, x):
        self.last = self.scale.detach()
        return super().forward(x)


def buffer_of_root(rank, world_size):
    model, _, engine = build(rank, world_size, block=Remembering, blocks=1, unit_policy=[Block])
    with pytest.raises(
        RuntimeError, match="Buffer '0.last' was set to a view of a sharded parameter.*clone"
    ):
        micro_batch(model, engine, rank, 0)
    return True


def test_a_buffer_that_views_a_weight_in_use_is_an_error():
    assert run_ranks(buffer_of_root, 2) == [True, True]


def step_after_arrays(rank, world_size, wire, write):
    """An optimizer steps inside the step, after the array of a weight in use was made."""
    import torch.distributed as dist

    from lightning_zero3.strategies.collectives import make_collectives
    from lightning_zero3.strategies.engine import Zero3Engine

    torch.manual_seed(0)
    model, alone = Scaled(), Scaled()
    alone.load_state_dict(model.state_dict())
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone))
    place = torch.device("cpu")
    communicators = make_collectives(dist.group.WORLD, place)
    options = {"wire_dtype": lambda name, parameter: torch.bfloat16} if wire else {}
    engine = Zero3Engine(
        model, [optimizer], device=place, collectives=communicators, unit_policy=[Block], **options
    )

    def train(module, stepping, backward):
        array = module.scale.detach().numpy()
        if write:
            array[1:3] = 0.5
        with backward():
            module(torch.ones(2, WIDTH)).square().mean().backward()
        stepping.step()
        return array[0]

    with engine.step():
        train(model, optimizer, engine.backward)
    train(alone, plain, nullcontext)
    if not wire:
        with gathered(model, modify=False):
            for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.detach(), theirs.detach())
    return True


@pytest.mark.parametrize(("wire", "write"), [(False, False), (False, True), (True, False)])
def test_an_optimizer_may_step_while_there_is_an_array(wire, write):
    assert run_ranks(step_after_arrays, 2, wire, write) == [True, True]


def write_rounded(rank, world_size):
    model, _, engine = build(rank, world_size, slot_dtype=lambda name, parameter: torch.float16)
    for write in (print, lambda array: array.fill(1.0)):
        hook = model[1].register_forward_pre_hook(
            lambda module, args, write=write: write(module.first.bias.detach().numpy())
        )
        told = "'1.first.bias' was changed in place while it is gathered in torch.float16"
        with nullcontext() if write is print else pytest.raises(RuntimeError, match=told):
            with torch.autocast("cpu", torch.float16), torch.no_grad(), engine.step():
                model(torch.ones(2, WIDTH))
        hook.remove()
    return True


def test_one_of_a_rounded_weight_can_be_read_and_a_write_is_an_error():
    assert run_ranks(write_rounded, 2) == [True, True]


def test_what_a_thread_holds_for_a_moment_is_waited_for():
    # Those of a process group hold what they have exchanged, in C++, a moment after they have said
    # that they are done.
    from lightning_zero3.strategies.engine.kept_views import _is_free_soon

    held = [5, 5, 4]
    assert _is_free_soon(SimpleNamespace(viewers=lambda: held.pop(0), usual=4)) and not held
    assert not _is_free_soon(SimpleNamespace(viewers=lambda: 5, usual=4))
