"""What autograd saves moves to the host and comes back: every number as without, to the bit."""

from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from helpers.models import TinyLm, make, part, tokens
from helpers.ranks import run_ranks
from lightning_zero3.strategies import activations
from lightning_zero3.strategies.collectives import LocalCollectives
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Offload, Zero3Engine
from lightning_zero3.strategies.engine.offload import start_worker
from lightning_zero3.strategies.engine.streams import Stream
from lightning_zero3.strategies.optimizers.param_groups import ParamGroups
from offload.late_device import LateStream, LateWorker, poison
from offload.test_engine import without

CPU = torch.device("cpu")
STEPS = 4


class Gated(nn.Module):
    """Saves views of one storage, a view that repeats, and what is changed in place before."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(10, 30)
        self.outer = nn.Linear(10, 10)

    def forward(self, x):
        a, b, c = self.inner(x).chunk(3, -1)
        scale = x.mean(-1, keepdim=True).expand_as(x)
        return x + self.outer(F.relu_((a * b.tanh() + c) * scale))


class Net(TinyLm):
    """Blocks of two kinds, run as ``how`` says."""

    how = "plain"

    def __init__(self):
        super().__init__(depth=2)
        self.blocks.extend([Gated(), Gated()])

    def forward(self, batch):
        x = self.embed(batch) + self.position
        for block in self.blocks:
            if self.how in ("re-entrant", "not re-entrant"):
                x = checkpoint(block, x, use_reentrant=self.how == "re-entrant")
            elif self.how == "without gradients between":
                with torch.no_grad():
                    block(x)
                x = block(x)
            else:
                x = block(x)
        return self.head(self.norm(x))

    def nested(self, batch):
        def both(x):
            x = checkpoint(self.blocks[1], self.blocks[0](x), use_reentrant=False)
            return checkpoint(self.blocks[2], x, use_reentrant=False)

        x = checkpoint(both, self.embed(batch) + self.position, use_reentrant=False)
        return self.head(self.norm(self.blocks[3](x)))

    def loss(self, batch):
        x, y = batch
        scores = self.nested(x) if self.how == "nested" else self(x)
        loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
        if self.how == "two forwards":
            return loss + F.cross_entropy(self(y).flatten(0, 1), x.flatten())
        if self.how == "double backward":
            (grad,) = torch.autograd.grad(scores.square().sum(), scores, create_graph=True)
            hidden = self.embed(x).detach().requires_grad_()
            out = self.blocks[2](self.blocks[0](hidden)).square().sum()
            (penalty,) = torch.autograd.grad(out, hidden, create_graph=True)
            return loss + 1e-3 * (penalty.square().sum() + grad.square().mean())
        return loss


def build(world_size, budget, late, how="plain", offload=None, device=CPU):
    model = make(Net)
    model.how = how
    if how == "compiled":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    group = make_collectives(dist.group.WORLD, device) if world_size > 1 else None
    engine = Zero3Engine(
        model,
        [optimizer],
        device=device,
        collectives=group or LocalCollectives(alone=False),
        unit_policy=lambda m: [m, *m.blocks],
        offload=offload,
        streams=LateStream if late else Stream,
        worker=LateWorker if late else start_worker,
    )
    moved = None
    if budget is not None:
        moved = activations.Activations(budget, engine, LateStream if late else Stream)
    ParamGroups([optimizer], lambda: engine, device).start(engine)
    return engine, optimizer, model, moved


def train(rank, world_size, budget, late, how="plain", offload=None, device=CPU):
    """Losses, and weights and state at the end."""
    engine, optimizer, model, moved = build(world_size, budget, late, how, offload, device)
    losses = []
    for batch in tokens(STEPS):
        batch = tuple(each.to(device) for each in part(batch, rank, world_size))
        with engine.step():
            loss = model.loss(batch)
        with engine.backward():
            loss.backward(retain_graph=how == "twice")
        if how == "twice":
            with engine.backward():
                loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if budget == 0:
        assert moved.memory.nbytes
    state = [
        v.to("cpu", copy=True) for p in model.parameters() for v in optimizer.state[p].values()
    ]
    engine.unshard()
    return losses, [*model.parameters(), *state]


HOW = [
    "plain",
    "re-entrant",
    "not re-entrant",
    "nested",
    "without gradients between",
    "two forwards",
    "double backward",
    "twice",
    "compiled",
]


CASES = [
    (0, True, None),
    (0, True, Offload("parameters")),
    (4000, True, None),
    (10**9, True, None),
    (0, False, None),
]


@patch.object(activations, "SMALLEST", 1)
def train_all(rank, world_size, how):
    """The run without, and those with."""
    return train(rank, world_size, None, True, how), {
        (budget, late, offload): train(rank, world_size, budget, late, how, offload)
        for budget, late, offload in CASES
    }


GATE = {"not re-entrant", "double backward"}


@pytest.mark.parametrize(
    ("world_size", "how"),
    [
        pytest.param(n, how, marks=() if n == 2 and how in GATE else pytest.mark.variant)
        for n in (1, 2)
        for how in HOW
    ],
)
def test_bit_for_bit(world_size, how):
    for (losses, values), found in run_ranks(train_all, world_size, how, timeout=100):
        assert losses[0] != losses[-1]
        for case, (its, there) in found.items():
            assert its == losses, case
            assert all(map(torch.equal, there, values)), case


def wait_and_bring(self, saved, unpack=activations.Activations._unpack):
    found = unpack(self, saved)
    self._stream.join(self._stream.queue.done + len(self._stream.queue.waiting))
    return found


def poison_what_is_freed(self, drop=False, land=activations.Activations._land):
    """Memory that is freed gets other values, perhaps before a copy of it is made."""
    before = [stored.here for stored in self._flight[0].members] if self._flight else []
    pairs = self._flight and self._flight[1]
    land(self, drop)
    for here in before if drop else ():
        storage = here.untyped_storage()
        # its own, the copy's in `pairs`, and `storage`
        if torch._C._storage_Use_Count(storage._cdata) <= 3:
            poison(pairs[0][1][:0].new_empty(0).set_(storage))


@patch.object(activations, "SMALLEST", 1)
def train_without(rank, world_size):
    """Whether losses are as without activations' moves: with the wait, and without it."""
    expected, _ = train(rank, world_size, None, True)
    hostile = partial(patch.object, activations.Activations, "_land", poison_what_is_freed)
    with hostile():
        with_it, _ = train(rank, world_size, 0, True)
    without(activations, "self._stream.join(")
    without_it, _ = train(rank, world_size, 0, True)  # what arrives is late
    with hostile(), patch.object(activations.Activations, "_unpack", wait_and_bring):
        freed, _ = train(rank, world_size, 0, True)  # it is not, but what leaves is
    return [losses == expected for losses in (with_it, without_it, freed)]


def test_a_wait_that_is_missing_shows():
    assert run_ranks(train_without, 1, timeout=60) == [[True, False, False]]


@patch.object(activations, "SMALLEST", 1)
def hold(rank, world_size):
    """How much of what blocks have made is still in memory when a forward has ended."""
    found = {}
    for budget, how in ((None, "plain"), (0, "plain"), (0, "not re-entrant"), (10**9, "plain")):
        engine, optimizer, model, moved = build(world_size, budget, late=True, how=how)
        made = []
        for block in model.blocks:
            block.register_forward_hook(
                lambda module, args, out, made=made: made.append(
                    StorageWeakRef(out.untyped_storage())
                )
            )
        rooms = []
        for batch in tokens(STEPS):
            made.clear()
            with engine.step():
                loss = model.loss(batch)
            there = [not storage.expired() for storage in made]
            with engine.backward():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rooms.append(moved is not None and moved.memory.nbytes)
            del loss
        after = [not storage.expired() for storage in made]
        found[budget, how] = there, after, rooms
    return found


def test_what_is_on_the_device():
    (found,) = run_ranks(hold, 1, timeout=60)
    there, after, _ = found[None, "plain"]
    assert there == [True] * 4 and after == [False] * 4
    there, after, rooms = found[0, "plain"]
    assert there == [False, True, True, True], "what the last two blocks have saved is there"
    assert after == [False] * 4
    assert rooms[0] == 0 and rooms[1] > 0, "registered between steps, when it is known how much"
    assert rooms[1:] == rooms[1:2] * 3, "and used again"
    there, after, _ = found[0, "not re-entrant"]
    assert there == [False, False, True, True], "inputs of checkpoints move, too"
    assert after == [False] * 4
    there, _, rooms = found[10**9, "plain"]
    assert there == [True] * 4 and not any(rooms), "all fits"


class Scores(torch.autograd.Function):
    """Saves a weight outside of its unit's forward, as fused losses do."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


@patch.object(activations, "SMALLEST", 1)
def do_odd_things(rank, world_size):
    """What is refused as in torch; graphs that live on, or are dropped; kinds of tensors."""
    engine, optimizer, model, _ = build(world_size, 0, late=True)
    plain = make(Net)
    batches = tokens(4)
    with engine.step():
        x = model.embed(batches[0][0])
        y = model.blocks[0](x).exp()
        y.add_(1)  # `exp` has saved it
        loss = model.blocks[1](y).sum()
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: \[torch.float32, shape \(\d+, "
    ):
        with engine.backward():
            loss.backward()
    optimizer.zero_grad()
    with engine.step():
        model.loss(batches[0])  # nobody differentiates it
    with engine.step():
        kept = model.loss(batches[1])
    with engine.step():
        loss = model.loss(batches[2])
    with engine.backward():
        (loss + kept).backward()
    losses = [plain.loss(batches[1]), plain.loss(batches[2])]
    sum(losses).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
    optimizer.zero_grad()
    plain.zero_grad()
    with engine.step():
        loss = Scores.apply(model.norm(model.embed(batches[3][0])), model.head.weight).sum()
    with engine.backward():
        loss.backward()
    Scores.apply(plain.norm(plain.embed(batches[3][0])), plain.head.weight).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)
    optimizer.zero_grad()
    leaf = torch.randn(3, 10, requires_grad=True)
    values = []
    for run in (engine.step, nullcontext):
        with run():
            z = torch.view_as_complex(torch.stack([leaf, leaf.sin()], -1))
            value = (z * z.conj() * z.conj().imag).abs().square().sum()
            value = value + torch.sparse.mm(torch.eye(3).to_sparse(), leaf.exp()).square().sum()
            rows = torch.nested.nested_tensor([leaf[0], leaf[1, :5]])
            value = value + (rows * rows).to_padded_tensor(0.0).sum()
            value = value + torch.vmap(lambda row: row.sin() * row)(leaf).sum()
        values.append(torch.autograd.grad(value, leaf)[0])
    assert torch.equal(*values)


def test_odd_things():
    run_ranks(do_odd_things, 1, timeout=60)
