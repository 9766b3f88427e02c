"""The communicator to the other ranks: its sums, gathers and agreements against what they must be."""

import os
import random
import time
from collections import deque
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import (
    ComparedCollectives,
    DivergenceError,
    GroupCollectives,
    Meeting,
)
from lightning_zero3.strategies.communicators import SharedMemoryCollectives, make_collectives
from lightning_zero3.strategies.engine import Zero3Engine

WORLD_SIZES = [2, 3, 4, 5]
KINDS = {
    "shared": SharedMemoryCollectives.open,
    "messages": ComparedCollectives,
    "group": GroupCollectives,
}
SHARDS = [(4, torch.float32), (1024, torch.float32), (40, torch.float64), (16, torch.float32)]


def values_of(rank, world_size, k):
    numel, dtype = SHARDS[k]
    return torch.randn(
        world_size * numel, dtype=dtype, generator=torch.Generator().manual_seed(100 * k + rank)
    )


def sums(rank, world_size, kind, together):
    """Every sum of SHARDS, one after another or all in flight together, three times over."""
    communicator = KINDS[kind](dist.group.WORLD)
    memory = communicator.allocate(
        sum(world_size * numel * dtype.itemsize for numel, dtype in SHARDS), torch.device("cpu")
    )
    for _ in range(3):
        buffers, start = [], 0
        for k in range(len(SHARDS)):
            values = values_of(rank, world_size, k)
            buffers.append(memory[start : start + values.nbytes].view(values.dtype).copy_(values))
            start += values.nbytes
        if together:
            pending = [communicator.reduce_scatter(buffer) for buffer in buffers]
            totals = [work.wait() for work in pending]
        else:
            totals = [communicator.reduce_scatter(buffer).wait() for buffer in buffers]
    return [total.clone() for total in totals]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_reduce_scatter_sums(kind, together, world_size):
    results = run_ranks(sums, world_size, kind, together, timeout=30)
    for k in range(len(SHARDS)):
        total = sum(values_of(r, world_size, k) for r in range(world_size))
        for rank, mine in enumerate(results):
            expected = total.chunk(world_size)[rank]
            if kind != "group":
                assert torch.equal(mine[k], expected), "not the sum in rank order"
            else:
                torch.testing.assert_close(mine[k], expected)


def gathers(rank, world_size, kind):
    communicator = KINDS[kind](dist.group.WORLD)
    memory = communicator.allocate(world_size * (1 << 13), torch.device("cpu"))
    buffers, start = [], 0
    for k in range(len(SHARDS)):
        values = values_of(0, world_size, k)
        if k < 3:  # the last one lies elsewhere
            buffer = memory[start : start + values.nbytes].view(values.dtype)
            start += values.nbytes
        else:
            buffer = torch.empty_like(values)
        buffer.fill_(float("nan")).chunk(world_size)[rank].copy_(
            values_of(rank, world_size, k).chunk(world_size)[rank]
        )
        buffers.append(buffer)
    for work in [communicator.all_gather(buffer.view(torch.uint8)) for buffer in buffers]:
        work.wait()
    farthest = communicator.agree(torch.tensor([rank, -rank, 7]))
    half = torch.full((3,), float(rank), dtype=torch.bfloat16)
    return (
        buffers,
        farthest.tolist(),
        communicator.broadcast(half).tolist(),
        communicator.all_reduce(torch.tensor([rank + 1.0])).item(),
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_gather_agree_broadcast(kind, world_size):
    for buffers, farthest, half, total in run_ranks(gathers, world_size, kind, timeout=30):
        for k, buffer in enumerate(buffers):
            expected = torch.cat(
                [values_of(r, world_size, k).chunk(world_size)[r] for r in range(world_size)]
            )
            assert torch.equal(buffer, expected)
        assert farthest == [world_size - 1, 0, 7]
        assert half == [0.0, 0.0, 0.0]
        assert total == world_size * (world_size + 1) / 2


def kinds(rank, world_size):
    cpu = torch.device("cpu")
    return type(make_collectives(dist.group.WORLD, cpu)).__name__, type(
        make_collectives(None, cpu)
    ).__name__


def test_which_communicator():
    assert run_ranks(kinds, 1, timeout=30) == [("LocalCollectives", "LocalCollectives")]
    assert run_ranks(kinds, 2, timeout=30) == [("SharedMemoryCollectives", "LocalCollectives")] * 2


def races(rank, world_size, kind):
    """Ranks that sleep at random, over memory that is used again all the time."""
    communicator, chance = KINDS[kind](dist.group.WORLD), random.Random(rank)
    common = random.Random(7)  # all ranks do the same
    nbytes = world_size * (1 << 13)
    memory, *slots = (communicator.allocate(nbytes, torch.device("cpu")) for _ in range(4))
    flying, sums = deque(), []
    for step in range(400):
        numel = 4 * common.randrange(1, 512)
        if common.random() < 0.5:
            slots.append(slots.pop(0))
            buffer = slots[-1][: 4 * world_size * numel].view(torch.float32)
            buffer.view(world_size, -1)[rank] = float(step * world_size + rank)
            flying.append((step, buffer, communicator.all_gather(buffer.view(torch.uint8), step)))
        else:
            buffer = memory[: 4 * world_size * numel].view(torch.float32).fill_(float(step + rank))
            sums.append((step, communicator.reduce_scatter(buffer, step).wait().clone()))
            buffer.fill_(-1.0)
        if common.random() < 0.3:
            # its result is only there when this rank has read, too
            found = communicator.agree(torch.tensor([rank, step - rank]))
            assert found.tolist() == [world_size - 1, step]
        if chance.random() < 0.1:
            time.sleep(chance.random() / 200)
        while len(flying) > (1 if step < 399 else 0):
            number, buffer, work = flying.popleft()
            work.wait()
            expected = (number * world_size + torch.arange(world_size)).repeat_interleave(
                buffer.numel() // world_size
            )
            assert torch.equal(buffer, expected.float()), number
            buffer.fill_(-1.0)  # as a module may do with its weights
    for step, total in sums:
        assert (total == sum(step + r for r in range(world_size))).all(), step
    return len(sums)


@pytest.mark.parametrize("kind", ["shared", "messages"])
def test_memory_that_is_used_again(kind):
    assert min(run_ranks(races, 3, kind, timeout=60)) > 100


def interrupted(rank, world_size):
    communicator = KINDS["shared"](dist.group.WORLD)
    block = communicator.allocate(64, torch.device("cpu"))
    rows, post = block.view(world_size, -1), communicator._post

    def interrupt(label, read, result=None):
        answers = iter([KeyboardInterrupt()])

        def reads():
            read()
            if error := next(answers, None):
                raise error

        return post(label, reads, result)

    for step in range(1, 4):
        rows[rank].fill_(10 * step + rank)
        communicator._post = interrupt if step == 2 and rank == 0 else post
        try:
            communicator.all_gather(block, 0).wait()
        except KeyboardInterrupt:
            assert step == 2 and rank == 0
        if step != 2:
            assert rows[:, 0].tolist() == [10 * step + each for each in range(world_size)]


def test_an_exchange_in_whose_reading_a_signal_raises_is_read_again():
    run_ranks(interrupted, 2, timeout=30)


def different_exchanges(rank, world_size, mine):
    communicator = KINDS["shared"](dist.group.WORLD)
    communicator.exchange_log.describe = {
        0: "unshard unit a",
        1: "unshard unit b",
        Meeting.AGREEMENT: "agree",
    }.__getitem__
    slot = communicator.allocate(64, torch.device("cpu"))
    with pytest.raises(DivergenceError) as caught:
        if mine[rank] < 0:
            communicator.agree(torch.tensor([1]))
        else:
            communicator.all_gather(slot, mine[rank]).wait()
    return str(caught.value)


@pytest.mark.parametrize(("mine", "other"), [([0, 1], "unshard unit b"), ([0, -1], "agree")])
def test_ranks_in_different_exchanges_of_shared_memory(mine, other):
    first, second = run_ranks(different_exchanges, 2, mine, timeout=30)
    assert f"rank 0 is about to unshard unit a, rank 1 to {other}" in first
    assert f"rank 1 is about to {other}, rank 0 to unshard unit a" in second


def elsewhere_after_a_gather(rank, world_size):
    """Rank 1 begins a gather that rank 0 ends, and then does something else."""
    communicator = KINDS["shared"](dist.group.WORLD)
    first, second = (communicator.allocate(64, torch.device("cpu")) for _ in range(2))
    first.view(world_size, -1)[rank] = rank + 1
    if rank == 0:
        time.sleep(0.5)  # rank 1 cannot read at once
    gather = communicator.all_gather(first, 0)
    with pytest.raises(DivergenceError):
        if rank == 0:
            gather.wait()
            communicator.all_gather(second, 1).wait()
        else:
            communicator.agree(torch.tensor([1]))
    return first.tolist()


def test_ranks_that_part_after_a_gather_has_begun():
    assert run_ranks(elsewhere_after_a_gather, 2, timeout=30) == [[1] * 32 + [2] * 32] * 2


def apart_while_one_waits(rank, world_size):
    """Rank 0 waits for the second exchange, in which the ranks differ, and rank 1 for the first."""
    communicator = KINDS["shared"](dist.group.WORLD)
    communicator.exchange_log.describe = {
        0: "reduce unit a",
        1: "unshard unit b",
        2: "unshard unit c",
    }.__getitem__
    blocks = [communicator.allocate(64, torch.device("cpu")) for _ in range(2)]
    with pytest.raises(DivergenceError) as caught:
        reduced = communicator.reduce_scatter(blocks[0], 0)
        gathered = communicator.all_gather(blocks[1], 1 + rank)
        if rank:
            reduced.wait()
        gathered.wait()
    return str(caught.value)


def test_a_rank_that_waits_learns_that_another_has_parted():
    first, second = run_ranks(apart_while_one_waits, 2, timeout=30)
    assert "rank 0 is about to unshard unit b, rank 1 to unshard unit c" in first
    assert "rank 1 is about to unshard unit c, rank 0 to unshard unit b" in second


def left_alone(rank, world_size):
    communicator = KINDS["shared"](dist.group.WORLD)
    slot = communicator.allocate(64, torch.device("cpu"))
    if rank == 1:
        os._exit(0)
    began = time.monotonic()
    with pytest.raises(
        RuntimeError,
        match=r"connection to rank 1 is lost: its process \d+ has ended while rank 0 waited",
    ):
        communicator.all_gather(slot, 0).wait()
    Path(os.environ["FOUND"]).write_text(str(time.monotonic() - began))


def test_a_rank_that_dies_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("FOUND", str(tmp_path / "seconds"))
    # at the barrier after it
    with pytest.raises(AssertionError, match="left_alone: rank 0 of 2 failed"):
        run_ranks(left_alone, 2, timeout=30)
    assert float((tmp_path / "seconds").read_text()) < 5


def trains(rank, world_size, kind):
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
    optimizer = torch.optim.Adam(model.parameters())
    engine = Zero3Engine(
        model,
        [optimizer],
        device=cpu,
        collectives=KINDS[kind](dist.group.WORLD),
        unit_policy=["Linear"],
    )
    for step in range(4):
        with engine.step():
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))
            loss = model(x).square().mean()
        with engine.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value for unit in engine.units for name, value in unit.values().items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_training_is_bitwise_the_same_through_both_communicators(world_size):
    for shared, messages in zip(
        run_ranks(trains, world_size, "shared"),
        run_ranks(trains, world_size, "messages"),
        strict=True,
    ):
        assert shared.keys() == messages.keys()
        assert all(torch.equal(shared[name], messages[name]) for name in shared)


# ---- a default device ------------------------------------------------------------------------


def train(rank, world_size, kind, default):
    torch.set_default_device(default)
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4, device="cpu") for _ in range(3)])
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator("cpu").manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, device="cpu", generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Zero3Engine(
        model, [optimizer], device=torch.device("cpu"), collectives=KINDS[kind](dist.group.WORLD)
    )
    losses = []
    for _ in range(3):
        with engine.step():
            losses.append(model(torch.ones(2, 4, device="cpu")).square().mean())
        with engine.backward():
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("kind", KINDS)
def test_a_default_device_is_not_that_of_exchanges(kind):
    """`torch.set_default_device` is for the user's tensors. Nothing on this one could be read."""
    assert run_ranks(train, 2, kind, "meta") == run_ranks(train, 2, kind, None)
