"""Random numbers of datasets and collate functions: by batch, and by sample on any world size."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from data.datasets import Augmented, NoisyStream, StatefulStream, Stream, make_loader, shards
from data.trainers import fit
from lightning_zero3.strategies.data.seeding import sample_seed

pytestmark = pytest.mark.timeout(100)
N = 8


def noise():
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def collate_with_noise(samples):
    return torch.cat([default_collate(samples), torch.tensor([noise()] * len(samples))], 1)


class Noisy:
    """Mixed into a stream of numbers: each comes with noise, and with that of the beginning."""

    def __iter__(self):
        # A stream with a state begins anew in the middle.
        first = [0.0] * 3 if hasattr(self, "state_dict") else noise()
        for index in super().__iter__():
            yield torch.tensor([index, *first, *noise()], dtype=torch.float64)


class NoisyWithoutState(Noisy, Stream):
    pass


class NoisyWithState(Noisy, StatefulStream):
    pass


class BatchedNoise(Augmented):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


DATA = {
    "map": (Augmented, {"shuffle": True}),
    "whole batches": (BatchedNoise, {"shuffle": True}),
    "one by one": (Augmented, {"batch_size": None, "collate_fn": None}),
    "stream": (NoisyWithoutState, {}),
    "stream with a state": (NoisyWithState, {}),
}


def noisy_shards(kind, world, workers=0, **options):
    dataset, kwargs = DATA[kind]
    kwargs = {"batch_size": 2, "collate_fn": collate_with_noise, **kwargs}
    return shards(lambda: make_loader(dataset(4 * N), workers, **kwargs), world, **options)


@pytest.mark.filterwarnings("ignore:.*cannot go to a position")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", DATA)
def test_noise_goes_on_by_default_after_any_batch(kind, world, workers):
    whole, states = [], []
    for loader in noisy_shards(kind, world, workers):
        whole.append([])
        states.append([])
        for batch in loader:
            torch.rand(7), random.random(), np.random.rand()  # as a step draws dropout
            whole[-1].append(batch)
            states[-1].append(loader.state_dict())
    batches = len(whole[0])
    for stop in {1, 2, batches // 2, batches - 1}:
        torch.manual_seed(stop)
        for rank, loader in enumerate(noisy_shards(kind, world, workers)):
            loader.load_state_dict(states[rank][stop - 1])
            rest = list(loader)
            assert len(rest) == batches - stop
            assert all(map(torch.equal, rest, whole[rank][stop:])), (stop, rank)
    if workers and "stream" not in kind:
        one_process = noisy_shards(kind, world, 0)
        assert all(
            torch.equal(*pair)
            for rank, loader in enumerate(one_process)
            for pair in zip(loader, whole[rank], strict=True)
        )


def test_no_two_batches_have_the_same_noise():
    for kind in DATA:
        batches = []
        for stage in ("fit", "validate"):
            # On two ranks, which do not share whole items that come one by one.
            for loader in noisy_shards(kind, 2, stage=stage):
                for epoch in (0, 1):
                    loader.set_epoch(epoch)
                    batches += [batch.reshape(-1, batch.shape[-1]) for batch in loader]
        # A stream's columns 1 to 3 are drawn once, as it begins.
        columns = slice(4 if "stream" in kind else 1, None)
        drawn = [batch[:, columns].unique().tolist() for batch in batches]
        assert len(set(itertools.chain(*drawn))) == sum(map(len, drawn)) > len(batches), kind


def test_a_loader_beside_has_other_noise(tmp_path):
    def both():
        return {name: make_loader(Augmented(N), batch_size=2) for name in "ab"}

    module, _ = fit(str(tmp_path), {"train": both}, every=0, max_epochs=1)
    for _, _, batch in module.seen["train"]:
        a, b = torch.tensor(batch["a"]), torch.tensor(batch["b"])
        assert torch.equal(a[:, 0], b[:, 0]) and not (a[:, 1:] == b[:, 1:]).any()


class SharesItselfOut(IterableDataset):
    """As torch's documentation shows it: a function changes the worker's copy of the dataset."""

    start, step = 0, 1

    def __iter__(self):
        yield from range(self.start, N, self.step)


def share_out(worker):
    info = get_worker_info()
    assert type(info.dataset) is SharesItselfOut
    info.dataset.start, info.dataset.step = worker, info.num_workers


def test_workers_find_the_users_dataset():
    make = lambda: make_loader(SharesItselfOut(), 2, batch_size=2, worker_init_fn=share_out)  # noqa: E731
    assert sorted(torch.cat(list(shards(make, 1)[0])).tolist()) == list(range(N))


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
    seed = sample_seed(5, 2, 7)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    generator = torch.Generator().manual_seed(seed)
    expected = [random.random(), np.random.rand(), torch.rand((), generator=generator).item()]
    loader = shards(lambda: DataLoader(Augmented(N), batch_size=2), 1, per_sample_seed=True)[0]
    loader.set_epoch(2)
    rows = torch.cat(list(loader))
    assert rows[7].tolist() == [7.0, *expected]
    seeds = {sample_seed(0, e, i) for e in range(50) for i in range(200)}
    assert len(seeds) == 50 * 200
    assert sample_seed(0, 0, "a") != sample_seed(0, 0, "b")


@pytest.mark.parametrize("per_sample_seed", [False, True])
@pytest.mark.parametrize("kind", DATA)
def test_the_main_process_keeps_its_generators(kind, per_sample_seed):
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = [noise() for _ in range(3)]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    loader = noisy_shards(kind, 1, per_sample_seed=per_sample_seed)[0]
    batches = iter(loader)
    found = [noise()]
    next(batches)
    found.append(noise())
    list(batches)
    assert [*found, noise()] == expected


@pytest.mark.filterwarnings("ignore:.*cannot go to a position")
def test_streams_too():
    def read(world, stop=None):
        make = lambda: DataLoader(NoisyStream(N), batch_size=2)  # noqa: E731
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
