"""Per-sample randomness: bitwise equal on any world size, worker count and restart."""

import itertools
import random

import numpy as np
import pytest
import torch
from data.datasets import Augmented, make_loader, shards
from torch.utils.data import DataLoader, IterableDataset

from lightning_zero3.strategies.data.seeding import SampleKey, sample_seed

pytestmark = pytest.mark.timeout(100)
N = 14


def samples(world, workers, stop=0, resumed_world=None, epoch=0):
    """Every sample's augmented value, by index; those after ``stop`` come from a resumed run."""

    def make():
        return make_loader(Augmented(N), workers, batch_size=2, shuffle=True)

    loaders = shards(make, world, per_sample_seed=True, tail="balance")
    for loader in loaders:
        loader.set_epoch(epoch)
    batches = [batch for loader in loaders for batch in itertools.islice(loader, stop or None)]
    if stop:
        resumed = shards(make, resumed_world, per_sample_seed=True, tail="balance", seed=77)
        for loader in resumed:
            loader.load_state_dict(loaders[0].state_dict())
            batches += list(loader)
    rows = torch.cat(batches)
    assert sorted(rows[:, 0].tolist()) == list(range(N))
    return rows[rows[:, 0].argsort()]


def test_augmentation_does_not_depend_on_world_workers_or_restarts():
    expected = samples(1, 0)
    for world in (1, 2, 3):
        for workers in (0, 1, 3):
            assert torch.equal(samples(world, workers), expected)
        for stop in range(1, 3):
            for resumed_world in (1, 2, 3):
                assert torch.equal(samples(world, 0, stop, resumed_world), expected)
        assert torch.equal(samples(world, 3, 1, 2), expected)
    assert not torch.equal(samples(1, 0, epoch=1)[:, 1:], expected[:, 1:])
    assert torch.equal(samples(1, 0, epoch=1), samples(2, 3, epoch=1))


def test_the_seed_of_a_sample_is_its_key():
    seed = sample_seed(5, SampleKey(2, 9))
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    generator = torch.Generator().manual_seed(seed)
    expected = [random.random(), np.random.rand(), torch.rand((), generator=generator).item()]
    loader = shards(lambda: DataLoader(Augmented(N), batch_size=2), 1, per_sample_seed=True)[0]
    loader.set_epoch(2)
    rows = torch.cat(list(loader))
    assert rows[9].tolist() == [9.0, *expected]
    seeds = {sample_seed(0, SampleKey(e, i)) for e in range(50) for i in range(200)}
    assert len(seeds) == 50 * 200
    assert sample_seed(0, SampleKey(0, "a")) != sample_seed(0, SampleKey(0, "b"))


def test_the_main_process_keeps_its_generators():
    def draws(per_sample_seed):
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        loader = shards(lambda: DataLoader(Augmented(4)), 1, per_sample_seed=per_sample_seed)[0]
        if per_sample_seed:
            list(loader)
        return torch.rand(()).item(), random.random(), np.random.rand()

    assert draws(True) == draws(False)


class NoisyStream(IterableDataset):
    def __iter__(self):
        for index in range(N):
            yield torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:.*every rank reads the whole stream", "ignore:.*cannot go to a position")
def test_streams_too():
    def read(world, stop=None):
        make = lambda: DataLoader(NoisyStream(), batch_size=2)  # noqa: E731
        loaders = shards(make, world, per_sample_seed=True, tail="balance")
        batches = [batch for loader in loaders for batch in itertools.islice(loader, stop)]
        if stop:
            resumed = shards(make, 1, per_sample_seed=True)[0]
            resumed.load_state_dict(loaders[0].state_dict())
            batches += list(resumed)
        rows = torch.cat(batches)
        return rows[rows[:, 0].argsort()]

    expected = read(1)
    assert torch.equal(read(2), expected) and torch.equal(read(3), expected) and torch.equal(read(2, 1), expected)
