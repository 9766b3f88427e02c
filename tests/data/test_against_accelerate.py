"""Random cases against Accelerate's own samplers, where it is installed."""

import random

import pytest

from lightning_zero3.strategies.data.order import RowPlan, stream_rows, take

data_loader = pytest.importorskip("accelerate.data_loader")
from torch.utils.data import BatchSampler  # noqa: E402


def test_random_cases():
    rng = random.Random(1)
    for case in range(1000):
        split, even, drop = (rng.random() < 0.5 for _ in range(3))
        world, batch, n = rng.randint(1, 8), rng.randint(1, 6), rng.randint(0, 80)
        source = BatchSampler(range(n), batch * world if split else batch, drop)
        plan = RowPlan(n, batch, world, "wrap" if even else "uneven", drop)
        rows = list(stream_rows(iter(range(n)), plan, lambda: None))
        for rank in range(world):
            expected = list(data_loader.BatchSamplerShard(source, world, rank, split, even))
            ours = [cell for row in range(plan.rows) if (cell := take(range(n), plan, row, rank))]
            assert ours == expected, (case, plan, split)
            assert [row.cells[rank] for row in rows if row.cells[rank]] == expected
            if not split or even:  # Accelerate's len is one too large for some ranks otherwise
                shard = data_loader.BatchSamplerShard(source, world, rank, split, even)
                if n or split:
                    assert plan.batches(rank) == len(shard) or (split and drop)


def test_random_streams():
    rng = random.Random(2)
    for _ in range(500):
        split, drop = (rng.random() < 0.5 for _ in range(2))
        world, batch, n = rng.randint(1, 6), rng.randint(1, 5), rng.randint(0, 60)
        rows = list(stream_rows(iter(range(n)), RowPlan(0, batch, world, "wrap", drop), lambda: None))
        for rank in range(world):
            shard = data_loader.IterableDatasetShard(range(n), batch * world if split else batch, drop, world, rank, split)
            assert [i for row in rows for i in row.cells[rank]] == list(shard)
