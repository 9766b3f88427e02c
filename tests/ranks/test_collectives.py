"""The door to the other ranks: its sums, gathers and agreements against what they must be."""

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import run_ranks
from lightning_zero3.strategies.engine import GroupCollectives, PairwiseCollectives, make_collectives

WORLD_SIZES = [2, 3, 4, 5]
SHARDS = [(4, torch.float32), (1024, torch.float32), (40, torch.float64), (16, torch.float32)]


def values_of(rank, world_size, k):
    numel, dtype = SHARDS[k]
    return torch.randn(world_size * numel, dtype=dtype, generator=torch.Generator().manual_seed(100 * k + rank))


def sums(rank, world_size, kind, together):
    """Every sum of SHARDS, one after another or all in flight together, three times over."""
    door = kind(dist.group.WORLD)
    for _ in range(3):
        buffers = [values_of(rank, world_size, k) for k in range(len(SHARDS))]
        if together:
            pending = [door.reduce_scatter(buffer) for buffer in buffers]
            totals = [work.wait() for work in pending]
        else:
            totals = [door.reduce_scatter(buffer).wait() for buffer in buffers]
    return [total.clone() for total in totals]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", [PairwiseCollectives, GroupCollectives])
def test_reduce_scatter_sums(kind, together, world_size):
    results = run_ranks(sums, world_size, kind, together, timeout=30)
    for k in range(len(SHARDS)):
        total = sum(values_of(r, world_size, k) for r in range(world_size))
        for rank, mine in enumerate(results):
            expected = total.chunk(world_size)[rank]
            if kind is PairwiseCollectives:
                assert torch.equal(mine[k], expected), "not the sum in rank order"
            else:
                torch.testing.assert_close(mine[k], expected)


def gathers(rank, world_size, kind):
    door = kind(dist.group.WORLD)
    buffers = []
    for k in range(len(SHARDS)):
        buffer = torch.full_like(values_of(0, world_size, k), float("nan"))
        buffer.chunk(world_size)[rank].copy_(values_of(rank, world_size, k).chunk(world_size)[rank])
        buffers.append(buffer)
    for work in [door.all_gather(buffer.view(torch.uint8)) for buffer in buffers]:
        work.wait()
    farthest = door.agree(torch.tensor([rank, -rank, 7]))
    half = torch.full((3,), float(rank), dtype=torch.bfloat16)
    return buffers, farthest.tolist(), door.broadcast(half).tolist(), door.all_reduce(torch.tensor([rank + 1.0])).item()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kind", [PairwiseCollectives, GroupCollectives])
def test_gather_agree_broadcast(kind, world_size):
    for buffers, farthest, half, total in run_ranks(gathers, world_size, kind, timeout=30):
        for k, buffer in enumerate(buffers):
            expected = torch.cat([values_of(r, world_size, k).chunk(world_size)[r] for r in range(world_size)])
            assert torch.equal(buffer, expected)
        assert farthest == [world_size - 1, 0, 7]
        assert half == [0.0, 0.0, 0.0]
        assert total == world_size * (world_size + 1) / 2


def kinds(rank, world_size):
    cpu = torch.device("cpu")
    return type(make_collectives(dist.group.WORLD, cpu)).__name__, type(make_collectives(None, cpu)).__name__


def test_which_door():
    assert run_ranks(kinds, 1, timeout=30) == [("LocalCollectives", "LocalCollectives")]
    assert run_ranks(kinds, 2, timeout=30) == [("PairwiseCollectives", "LocalCollectives")] * 2
