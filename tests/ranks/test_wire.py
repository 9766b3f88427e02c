"""bfloat16 on the wire: what is exact about it, how far it may be from fp32, and its bytes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.checked_units import CheckedUnit
from lightning_zero3.strategies.collectives import ComparedCollectives, GroupCollectives
from lightning_zero3.strategies.collectives.rounding import ROOM, narrow
from lightning_zero3.strategies.communicators import (
    SharedMemoryCollectives,
    make_collectives,
    make_hybrid_collectives,
)
from lightning_zero3.strategies.engine import Unit, Zero3Engine

BF16 = torch.bfloat16


@pytest.mark.parametrize("n", [2, 16, 4096, 4098, 8192, 100_000])
def test_values_move_within_their_buffer(n):
    values = torch.randn(n)
    buffer, room = values.clone(), torch.empty(ROOM, dtype=torch.uint8)
    low = narrow(buffer, BF16, room)
    assert low.data_ptr() == buffer.data_ptr() and torch.equal(low, values.to(BF16))


# ---- sums ------------------------------------------------------------------------------------


def summands(rank, world_size, shard):
    return torch.randn(
        world_size * shard, generator=torch.Generator().manual_seed(rank)
    ) * 10.0 ** (rank % 3)


def sums(rank, world_size, shard):
    import random
    import time

    found = []
    for kind in (SharedMemoryCollectives.open, ComparedCollectives, GroupCollectives):
        communicator = kind(dist.group.WORLD)
        values = summands(rank, world_size, shard)
        room = torch.empty(ROOM, dtype=torch.uint8)
        buffer = communicator.allocate(2 * values.nbytes, torch.device("cpu"))[
            values.nbytes :
        ].view(torch.float32)
        if kind is SharedMemoryCollectives.open:
            communicator._group = None  # nothing is sent as a message
        for _ in range(4):
            time.sleep(random.random() / 50)  # ranks come in any order
            found.append(
                communicator.reduce_scatter_in(BF16, buffer.copy_(values), room).wait().clone()
            )
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_are_in_fp32_and_in_rank_order(world_size):
    shard = 2000
    total = torch.zeros(world_size * shard)
    for rank in range(world_size):
        total += summands(rank, world_size, shard).to(BF16).float()
    for rank, found in enumerate(run_ranks(sums, world_size, shard)):
        for mine in found:
            assert torch.equal(mine, total.chunk(world_size)[rank])


def hybrid_sums(rank, world_size, shard):
    communicator = make_hybrid_collectives(2, torch.device("cpu"))
    return communicator.reduce_scatter_in(
        BF16, summands(rank, 2, shard), torch.empty(ROOM, dtype=torch.uint8)
    ).wait()


def test_sums_over_replicas():
    shard, rounded = 1000, [summands(rank, 2, 1000).to(BF16).float() for rank in range(4)]
    total = (rounded[0] + rounded[1]) + (rounded[2] + rounded[3])
    for rank, mine in enumerate(run_ranks(hybrid_sums, 4, shard)):
        assert torch.equal(mine, total.chunk(2)[rank % 2])


# ---- training --------------------------------------------------------------------------------

WIDTH, STEPS = 96, 3


def make():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)
    ]
    model = nn.Sequential(*blocks, nn.LayerNorm(WIDTH))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model, rank, step):
    x, target = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x) - target).square().sum() / WIDTH


def reference(world_size, reduce):
    """Plain torch on one process; returns gradients and values after each step, and the mean of the
    gradients' magnitudes.
    """
    model, optimizer = make()
    steps = []
    for step in range(STEPS):
        shares = [
            torch.autograd.grad(loss_of(model, rank, step), list(model.parameters()))
            for rank in range(world_size)
        ]
        rounded = [[g.to(BF16).float() if reduce else g for g in share] for share in shares]
        for k, p in enumerate(model.parameters()):
            p.grad = sum(share[k] for share in rounded) / world_size
        magnitudes = [
            sum(share[k].abs() for share in shares) / world_size for k in range(len(shares[0]))
        ]
        names = [n for n, _ in model.named_parameters()]
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        values = {n: p.detach().clone() for n, p in model.named_parameters()}
        steps.append((grads, values, dict(zip(names, magnitudes, strict=True))))
    return steps


def train(rank, world_size, debug):
    model, optimizer = make()
    cpu = torch.device("cpu")
    engine = Zero3Engine(
        model,
        [optimizer],
        device=cpu,
        collectives=make_collectives(dist.group.WORLD, cpu),
        unit_policy=lambda m: list(m),
        reduce_dtype=BF16,
        unit_class=CheckedUnit if debug else Unit,
    )
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with engine.step():
            loss = loss_of(model, rank, step)
        with engine.backward():
            loss.backward()
        grads = {n: g.clone() for u in engine.units for n, g in u.gradients().items()}
        optimizer.step()
        steps.append((grads, {n: v.clone() for u in engine.units for n, v in u.values().items()}))
    return steps


@pytest.mark.parametrize(("world_size", "debug"), [(2, False), (3, False), (2, True)])
def test_training_is_what_plain_torch_computes_with_rounded_values(world_size, debug):
    everyone = run_ranks(train, world_size, debug)
    expected, exact = reference(world_size, True), reference(world_size, False)
    for found in everyone:
        for step, (grads, values) in enumerate(found):
            for name, grad in grads.items():
                # A summand at the border of two bf16 numbers may be rounded the other way, by one
                # unit in the last place.
                slack = 2**-7 * expected[step][2][name]
                assert (
                    (grad - expected[step][0][name]).abs() <= slack + 2e-6 * grad.abs().max()
                ).all(), (step, name)
            torch.testing.assert_close(values, expected[step][1], rtol=1e-3, atol=1e-5)
        for name, grad in found[0][0].items():
            # Each summand is rounded to eight significant bits: by 2^-8 of itself at most.
            bound = 2**-8 * exact[0][2][name]
            assert (
                (grad - exact[0][0][name]).abs() <= bound * (1 + 1e-3) + 2e-6 * grad.abs().max()
            ).all(), name
    assert any((everyone[0][0][0][n] != exact[0][0][n]).any() for n in exact[0][0]), (
        "nothing was rounded"
    )
    for found in everyone[1:]:
        for mine, first in zip(found, everyone[0], strict=True):
            assert all(torch.equal(mine[1][n], first[1][n]) for n in first[1])
