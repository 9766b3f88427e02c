"""Sharded map-style loaders, all ranks in one process, against plain lists and plain
DataLoaders.
"""

import itertools
import pickle
import weakref

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from data.datasets import Counted, Indices, Stream, as_list, make_loader, row_major, shards
from lightning_zero3.strategies.data import NoBatch

pytestmark = pytest.mark.timeout(100)
N, WORLDS = 26, (1, 2, 3, 4)


def run(loader, count=None):
    return [as_list(batch) for batch in itertools.islice(loader, count)]


def order_of(epoch, n=N, seed=5):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


def save_and_load(loader, target):
    """Through a file, as a checkpoint goes."""
    target.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))


def test_stop_at_every_batch_and_continue_on_any_world():
    def make():
        return DataLoader(Indices(N), batch_size=2, shuffle=True)

    for world in WORLDS:
        whole = [run(loader) for loader in shards(make, world)]
        for stop in range(len(whole[0])):
            loaders = shards(make, world)
            seen = [run(loader, stop) for loader in loaders]
            handed = stop * world * 2
            assert row_major(seen) == order_of(0)[:handed]
            for new_world in WORLDS:
                resumed = shards(make, new_world, seed=99)
                for loader in resumed:
                    save_and_load(loaders[0], loader)
                rest = [run(loader) for loader in resumed]
                left = N - handed
                assert row_major(rest)[:left] == order_of(0)[handed:]
                if new_world == world:
                    assert rest == [rank[stop:] for rank in whole]
                assert all(len(loader) == -(-N // (2 * new_world)) for loader in resumed)
                # the next epoch is whole, of the saved seed
                for rank, loader in enumerate(resumed):
                    assert loader.saved_run.batches + len(rest[rank]) == len(loader)
                    loader.set_epoch(1)
                    assert run(loader)[0] == order_of(1)[2 * rank : 2 * rank + 2]


def test_no_sample_is_read_to_be_skipped():
    dataset = Counted(1000)
    loader = shards(lambda: DataLoader(dataset, batch_size=10), 1)[0]
    run(loader, 90)
    resumed = shards(lambda: DataLoader(dataset, batch_size=10), 1)[0]
    save_and_load(loader, resumed)
    dataset.reads = 0
    assert next(iter(resumed)).tolist() == list(range(900, 910)) and dataset.reads == 10


def test_persistent_workers_and_epochs():
    loader = shards(
        lambda: make_loader(Indices(N), 2, batch_size=2, shuffle=True, persistent_workers=True), 1
    )[0]
    for epoch in (0, 1, 2):
        loader.set_epoch(epoch)
        assert row_major([run(loader)]) == order_of(epoch)
    loader.set_epoch(3)
    run(loader, 3)
    loader.load_state_dict(loader.state_dict())
    assert row_major([run(loader)]) == order_of(3)[6:]
    loader.close()


def test_the_last_batch_is_the_end_of_the_epoch():
    def make():
        return DataLoader(Indices(8), batch_size=2, shuffle=True)

    loader = shards(make, 2)[0]
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    assert state["place"]["is_finished"]
    resumed = shards(make, 2)[0]
    resumed.load_state_dict(state)
    assert run(resumed)[0] == order_of(1, 8)[:2]


def test_evaluation_sees_every_sample_once():
    for n in range(1, 40):
        for world in WORLDS:
            for drop_last in (False, True):
                loaders = shards(
                    lambda: DataLoader(Indices(n), batch_size=3, drop_last=drop_last),  # noqa: B023
                    world,
                    "validate",
                )
                count = n // 3 * 3 if drop_last else n
                batches = [run(loader) for loader in loaders]
                assert [len(loader) for loader in loaders] == [len(rank) for rank in batches]
                assert len({len(loader) for loader in loaders}) == 1
                per_rank = [
                    [batch for batch in rank if not isinstance(batch, NoBatch)] for rank in batches
                ]
                assert row_major(per_rank) == list(range(count))
                assert sum(map(len, batches)) - sum(map(len, per_rank)) == (
                    max(0, world - count) if count else 0
                )


def test_batch_size_one_says_who_has_fewer():
    loaders = shards(lambda: DataLoader(Indices(5)), 3, "test")
    assert loaders[0].batches_per_rank == [2, 2, 1]
    assert row_major([run(loader) for loader in loaders]) == list(range(5))


def test_users_own_order_or_seed_is_kept():
    loaders = shards(lambda: DataLoader(Indices(12), batch_size=2), 2)
    assert row_major([run(loader) for loader in loaders]) == list(range(12))

    def with_generator():
        return DataLoader(
            Indices(12), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
        )

    loaders = shards(with_generator, 2)
    for epoch in (2, 0, 1):
        for loader in loaders:
            loader.set_epoch(epoch)
        assert row_major([run(loader) for loader in loaders]) == order_of(epoch, 12, seed=3)


class Backwards:
    """A custom sampler that counts its epochs."""

    def __init__(self, n):
        self.n, self.epoch = n, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(i + self.epoch) % self.n for i in reversed(range(self.n))])

    def __len__(self):
        return self.n


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: Backwards(20),
        lambda: WeightedRandomSampler([1.0, 2.0] * 10, 20),
        lambda: RandomSampler(range(20), replacement=True, num_samples=31),
        lambda: [3, 1, 2, 19, 7],
    ],
)
def test_custom_samplers_are_shared_out(sampler):
    def make():
        return DataLoader(Indices(20), batch_size=2, sampler=sampler())

    for epoch in (0, 1):
        alone = shards(make, 1)[0]
        alone.set_epoch(epoch)
        expected = row_major([run(alone)])
        assert len(expected) == len(sampler())
        for world in (2, 3):
            loaders = shards(make, world, even_batches=False)
            for loader in loaders:
                loader.set_epoch(epoch)
            assert row_major([run(loader) for loader in loaders]) == expected
    if isinstance(sampler(), Backwards):
        assert expected == [(i + 1) % 20 for i in reversed(range(20))]


class Buckets:
    """A custom batch sampler with batches of several sizes and a misleading `batch_size`."""

    batches = [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9, 10]]

    def __init__(self, batch_size):
        if batch_size is not None:
            self.batch_size = batch_size

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_custom_batches_stay_whole_and_none_is_lost(batch_size):
    loaders = shards(lambda: DataLoader(Indices(11), batch_sampler=Buckets(batch_size)), 2)
    assert [run(loader) for loader in loaders] == [[[0, 1, 2], [5, 6, 7]], [[3, 4], [8, 9, 10]]]


class FixedBatches(BatchSampler):
    def __iter__(self):
        yield from super().__iter__()


def test_custom_batches_of_one_size_are_cut_like_samples():
    def make():
        return DataLoader(Indices(22), batch_sampler=FixedBatches(range(22), 4, False))

    loaders = shards(make, 2)
    assert [run(loader)[-1] for loader in loaders] == [[16, 17, 18, 19], [20, 21, 0, 1]]
    loaders = shards(make, 2, sharding="split")
    assert [run(loader)[-1] for loader in loaders] == [[20, 21], [0, 1]]


def test_without_batches():
    loaders = shards(lambda: DataLoader(Indices(5), batch_size=None), 2, even_batches=True)
    assert [run(loader) for loader in loaders] == [[0, 2, 4], [1, 3, 0]]


def test_a_second_pass_in_one_epoch_is_another_order_and_resumes():
    def make():
        return DataLoader(Indices(10), batch_size=2, shuffle=True)

    loader = shards(make, 1)[0]
    first, second = run(loader), run(loader)
    assert first != second and sorted(row_major([second])) == list(range(10))
    loader = shards(make, 1)[0]
    run(loader), run(loader, 2)
    resumed = shards(make, 1)[0]
    save_and_load(loader, resumed)
    assert run(resumed) == second[2:]


def test_batches_that_the_loop_holds_back_do_not_count():
    def make():
        return DataLoader(Indices(10), batch_size=2)

    loader = shards(make, 1)[0]
    run(loader, 3)
    loader.count_prefetched_batches = lambda: 1
    resumed = shards(make, 1)[0]
    save_and_load(loader, resumed)
    assert run(resumed)[0] == [4, 5]


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    run(shards(lambda: DataLoader(Indices(10), batch_size=2, shuffle=True), 2)[0])
    assert torch.rand(3).tolist() == expected


class Watching(Indices):
    """Notes whether the last batch is still there when a sample of the next one is read."""

    def __init__(self, size):
        super().__init__(size)
        self.last, self.there = lambda: None, []

    def __getitem__(self, index):
        self.there.append(self.last() is not None)
        return super().__getitem__(index)


class WatchingStream(Watching, Stream):
    def __iter__(self):
        return (self[index] for index in range(self.size))


@pytest.mark.parametrize("kind", [Watching, WatchingStream])
def test_a_batch_that_the_loop_has_dropped_is_freed_before_the_next_is_made(kind):
    dataset = kind(6)
    batches = iter(shards(lambda: DataLoader(dataset, batch_size=2), 1, tail="uneven")[0])
    for _ in range(3):
        batch = next(batches)
        dataset.last = weakref.ref(batch)
        del batch
    assert len(dataset.there) >= 6 and not any(dataset.there[:4])
