"""Sharded streams, all ranks in one process."""

import itertools
import pickle

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from data.datasets import (
    CONTEXT,
    FlaggedStream,
    Indices,
    StatefulStream,
    Stream,
    as_list,
    make_loader,
    row_major,
    shards,
)

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:.*cannot go to a position"),
]
KINDS = [Stream, StatefulStream, FlaggedStream]


def run(loader, count=None):
    return [as_list(batch) for batch in itertools.islice(loader, count)]


def save_and_load(loader, target):
    target.load_state_dict(pickle.loads(pickle.dumps(loader.state_dict())))


def items(per_rank):
    return sorted(i for rank in per_rank for batch in rank for i in batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["wrap", "balance"])
def test_stop_at_every_batch_and_continue_on_any_world(kind, tail):
    def make():
        return DataLoader(kind(23), batch_size=2)

    for world in (1, 2, 3, 4):
        whole = [run(loader) for loader in shards(make, world, tail=tail)]
        assert row_major(whole)[:23] == list(range(23))
        for stop in range(len(whole[0])):
            loaders = shards(make, world, tail=tail)
            seen = [run(loader, stop) for loader in loaders]
            for new_world in (1, 2, 3, 4):
                resumed = shards(make, new_world, tail=tail)
                for loader in resumed:
                    save_and_load(loaders[0], loader)
                rest = [run(loader) for loader in resumed]
                if new_world == world:
                    assert rest == [rank[stop:] for rank in whole]
                elif tail == "wrap":
                    handed = row_major(seen)
                    assert row_major(rest)[: 23 - len(handed)] == list(range(len(handed), 23))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_continue_in_turn(kind, persistent):
    def make():
        return make_loader(kind(13), 2, batch_size=2, persistent_workers=persistent)

    loaders = shards(make, 2, tail="balance")
    whole, states = [], []
    for loader in loaders:
        whole.append([])
        for batch in loader:
            whole[-1].append(as_list(batch))
            if loader is loaders[0]:
                states.append(pickle.dumps(loader.state_dict()))
    assert items(whole) == list(range(13))
    for stop, state in enumerate(states[:-1], start=1):
        resumed = shards(make, 2, tail="balance")
        for loader in resumed:
            loader.load_state_dict(pickle.loads(state))
        assert [run(loader) for loader in resumed] == [rank[stop:] for rank in whole]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [False, True])
def test_epochs_follow_each_other_after_a_restart_as_without_one(kind, length):
    def make():
        dataset = kind(9)
        if length:
            dataset.__class__ = type("Sized", (kind,), {"__len__": lambda self: 9})
        return DataLoader(dataset, batch_size=2)

    loader = shards(make, 1)[0]
    for epoch in range(3):
        loader.set_epoch(epoch)
        # As Lightning does when it knows the length: the end is never asked for.
        assert row_major([run(loader, 5)]) == list(range(9))
        resumed = shards(make, 1)[0]
        save_and_load(loader, resumed)
        assert resumed.epoch == epoch + 1
        assert row_major([run(resumed)]) == list(range(9))
        resumed.set_epoch(epoch + 2)
        assert row_major([run(resumed)]) == list(range(9))


def test_state_is_used_and_nothing_is_read_twice():
    dataset = StatefulStream(20)
    loader = shards(lambda: DataLoader(dataset, batch_size=2), 2)[0]
    run(loader, 2)
    state = loader.state_dict()
    fresh = StatefulStream(20)
    resumed = shards(lambda: DataLoader(fresh, batch_size=2), 2, tail="balance")[0]
    resumed.load_state_dict(state)
    assert run(resumed) == [[8, 9], [12, 13], [16, 17]] and fresh.loads == 1


def test_a_stream_without_state_is_skipped_and_says_so(capfd):
    def make():
        return DataLoader(Stream(20), batch_size=2)

    loader = shards(make, 1)[0]
    run(loader, 3)
    resumed = shards(make, 1)[0]
    save_and_load(loader, resumed)
    with pytest.warns(
        UserWarning,
        match=r"fit dataloader \(Stream\): Stream cannot go to a position.*\n.*state_dict",
    ):
        assert run(resumed, 1) == [[6, 7]]
    assert "| 6/6 [" in capfd.readouterr().err


def test_a_replaced_iterator_that_only_looked_ahead_loses_nothing():
    loader = shards(lambda: DataLoader(StatefulStream(20), batch_size=2), 1)[0]
    next(iter(loader))
    assert row_major([run(loader)]) == list(range(20))


def test_lengths():
    for workers in (0, 2):
        loaders = shards(lambda: make_loader(Stream(23, length=True), workers, batch_size=2), 3)  # noqa: B023
        assert [len(loader) for loader in loaders] == [len(run(loader)) for loader in loaders]
    with pytest.raises(TypeError, match="rank 0, fit dataloader.*no length"):
        len(shards(lambda: DataLoader(Stream(3)), 1)[0])


def test_without_batches():
    loaders = shards(lambda: DataLoader(Stream(5), batch_size=None), 2)
    assert [run(loader) for loader in loaders] == [[0, 2, 4], [1, 3, 0]]


def test_own_streams_are_left_whole():
    loaders = shards(lambda: DataLoader(Stream(5), batch_size=2), 2, streams="own")
    assert [run(loader) for loader in loaders] == [[[0, 1], [2, 3], [4]]] * 2


def test_another_number_of_workers_is_refused():
    loader = shards(lambda: make_loader(StatefulStream(20), 2, batch_size=2), 1)[0]
    run(loader, 1)
    other = shards(lambda: DataLoader(StatefulStream(20), batch_size=2), 1)[0]
    with pytest.raises(
        ValueError, match="rank 0, fit dataloader.*num_workers=2, this loader has 0"
    ):
        save_and_load(loader, other)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_stateful_dataloader(workers):
    def make(dataset, *args, **kwargs):
        context = CONTEXT if workers else None
        return lambda: StatefulDataLoader(
            dataset(*args),
            batch_size=2,
            num_workers=workers,
            multiprocessing_context=context,
            **kwargs,
        )

    for new in (make(Indices, 22, shuffle=True), make(Indices, 22), make(StatefulStream, 22)):
        whole = [run(loader) for loader in shards(new, 2, even_batches=False)]
        assert items(whole) == list(range(22))
        loaders = shards(new, 2, even_batches=False)
        run(loaders[0], 2)
        resumed = shards(new, 2, even_batches=False)
        for loader in resumed:
            save_and_load(loaders[0], loader)
        assert [run(loader) for loader in resumed] == [rank[2:] for rank in whole]
