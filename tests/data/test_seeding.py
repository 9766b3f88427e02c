"""Per-sample randomness: bitwise equal on any world size, worker count and restart."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from data.datasets import Augmented, make_loader, shards
from lightning_zero3.strategies.data.seeding import SampleKey, sample_seed

pytestmark = pytest.mark.timeout(100)
N = 8


def augmented(world, workers):
    def make():
        return make_loader(Augmented(N), workers, batch_size=2, shuffle=True)

    return shards(make, world, per_sample_seed=True, tail="balance")


def by_index(batches):
    """Every sample's augmented value, in the order of the dataset; each sample once."""
    rows = torch.cat(batches)
    assert sorted(rows[:, 0].tolist()) == list(range(N))
    return rows[rows[:, 0].argsort()]


def read_with_states(world, workers):
    """All ranks' batches, and rank 0's state after each of its own."""
    loaders = augmented(world, workers)
    states, ranks = [], [[] for _ in loaders]
    for rank, loader in enumerate(loaders):
        for batch in loader:
            ranks[rank].append(batch)
            if rank == 0:
                states.append(loader.state_dict())
    return ranks, states


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_augmentation_does_not_depend_on_world_workers_or_restarts():
    expected = by_index(list(augmented(1, 0)[0]))
    assert len(expected[:, 1:].unique()) == 3 * N, "every draw is another"
    cases = 0
    for world, workers in itertools.product((1, 2, 3), (0, 1, 3)):
        ranks, states = read_with_states(world, workers)
        assert torch.equal(by_index([batch for rank in ranks for batch in rank]), expected)
        for stop, new_world in itertools.product(range(1, len(states)), (1, 2, 3)):
            batches = [batch for rank in ranks for batch in rank[:stop]]
            for loader in augmented(new_world, workers):
                loader.load_state_dict(states[stop - 1])
                batches += list(loader)
            assert torch.equal(by_index(batches), expected), (world, workers, stop, new_world)
            cases += 1
    # workers, worlds to resume on, places to stop at on one, two and three ranks
    assert cases == 3 * 3 * 5
    loader = augmented(1, 0)[0]
    loader.set_epoch(1)
    assert not torch.equal(by_index(list(loader))[:, 1:], expected[:, 1:])


def test_the_seed_of_a_sample_is_its_key():
    seed = sample_seed(5, SampleKey(2, 7))
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    generator = torch.Generator().manual_seed(seed)
    expected = [random.random(), np.random.rand(), torch.rand((), generator=generator).item()]
    loader = shards(lambda: DataLoader(Augmented(N), batch_size=2), 1, per_sample_seed=True)[0]
    loader.set_epoch(2)
    rows = torch.cat(list(loader))
    assert rows[7].tolist() == [7.0, *expected]
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
            yield torch.tensor(
                [index, random.random(), np.random.rand(), torch.rand(()).item()],
                dtype=torch.float64,
            )


@pytest.mark.filterwarnings(
    "ignore:.*every rank reads the whole stream", "ignore:.*cannot go to a position"
)
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
    assert (
        torch.equal(read(2), expected)
        and torch.equal(read(3), expected)
        and torch.equal(read(2, 1), expected)
    )
