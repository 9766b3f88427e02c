"""What is refused, and in which words."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

from data.datasets import Indices, StatefulStream, Stream, shards
from helpers.ranks import run_ranks
from lightning_zero3.strategies.data import DataOptions, shard_dataloader

pytestmark = pytest.mark.timeout(40)


def shard_with_own_length(rank, world):
    return shard_or_say(DataLoader(Indices(10 + rank), batch_size=2), rank, world)


def shard_with_own_order(rank, world):
    order = [0, 1, 2, 3] if rank == 0 else [0, 2, 1, 3]
    return shard_or_say(DataLoader(Indices(4), sampler=order), rank, world)


def shard_with_endless_on_one_rank(rank, world):
    sampler = Endless() if rank else None
    return shard_or_say(DataLoader(Indices(4), sampler=sampler), rank, world)


def shard_or_say(loader, rank, world):
    try:
        shard_dataloader(loader, rank=rank, world_size=world, stage="fit", options=DataOptions())
    except ValueError as error:
        return str(error)


def test_ranks_that_do_not_agree_hear_it_on_every_rank():
    for rank, text in enumerate(run_ranks(shard_with_own_length, 2)):
        assert text.startswith(
            f"rank {rank}, fit dataloader (Indices, 1{rank} samples): the ranks do not agree"
        )
        assert "number of samples: by rank [10, 11]" in text and "Build dataset and sampler" in text
    for text in run_ranks(shard_with_own_order, 2):
        assert "the ranks do not agree about the checksum of the sampler's order" in text
    zero, one = run_ranks(shard_with_endless_on_one_rank, 2)
    assert (
        zero == f"on rank 1: {one}"
        and "rank 1, fit dataloader" in one
        and "Endless has no length" in one
    )


class Endless:
    """A sampler without a length."""

    def __iter__(self):
        return itertools.count()


def test_a_sampler_without_a_length():
    for arguments in (
        {"sampler": Endless()},
        {"batch_sampler": Endless()},
        {"sampler": Endless(), "batch_size": None},
    ):
        with pytest.raises(
            ValueError, match="Endless has no length.*\n.*`__len__`, or set Trainer"
        ):
            shards(lambda arguments=arguments: DataLoader(Indices(4), **arguments), 1)


def test_a_batch_that_cannot_be_split():
    with pytest.raises(
        ValueError,
        match=r"rank 0, fit dataloader.*in 3 equal parts, but batch_size is 4\.\nUse 3 or 6",
    ):
        shards(lambda: DataLoader(Indices(30), batch_size=4), 3, sharding="split")
    with pytest.raises(ValueError, match="in 3 equal parts, but batch_size is 4"):
        shards(lambda: DataLoader(Stream(30), batch_size=4), 3, sharding="split")
    batches = [[0, 1], [2]]
    with pytest.raises(ValueError, match="list yields whole batches of its own"):
        shards(lambda: DataLoader(Indices(3), batch_sampler=batches), 2, sharding="split")


def test_a_rank_without_any_sample():
    with pytest.raises(
        ValueError,
        match=r"fit dataloader \(Indices, 2 samples\):.*training batches, \[1, 1, 0\].*\n.*fewer ranks",
    ):
        shards(lambda: DataLoader(Indices(2)), 3, even_batches=False)


def test_training_that_would_hang():
    with pytest.raises(
        ValueError,
        match=r"different numbers of training batches, \[3, 2\]\.\nChoose even_batches=True",
    ):
        shards(lambda: DataLoader(Indices(10), batch_size=2), 2, tail="uneven")
    with pytest.raises(ValueError, match="batch size above 1"):
        shards(lambda: DataLoader(Indices(5), batch_size=1), 2, even_batches=False)


def test_a_state_of_other_data():
    def state_of(make):
        loader = shards(make, 1)[0]
        next(iter(loader))
        return loader.state_dict()

    state = state_of(lambda: DataLoader(Indices(10), batch_size=2))

    def load(make, state=state):
        shards(make, 1)[0].load_state_dict(state)

    with pytest.raises(
        ValueError, match=r"rank 0, fit dataloader \(Indices, 12 samples\).*length 10 then, 12 now"
    ):
        load(lambda: DataLoader(Indices(12), batch_size=2))
    with pytest.raises(ValueError, match="draws its order as 'sequential' then, 'shuffled' now"):
        load(lambda: DataLoader(Indices(10), batch_size=2, shuffle=True))
    with pytest.raises(ValueError, match="was a map, this is a stream"):
        load(lambda: DataLoader(StatefulStream(10), batch_size=2))
    with pytest.raises(ValueError, match="version None"):
        load(lambda: DataLoader(Indices(10), batch_size=2), {"_num_yielded": 3})
    # another batch size is a place like any other
    load(lambda: DataLoader(Indices(10), batch_size=5))


def test_a_stream_that_is_shorter_than_it_was():
    loader = shards(lambda: DataLoader(Stream(10), batch_size=2), 1)[0]
    batches = iter(loader)
    next(batches), next(batches), next(batches)
    resumed = shards(lambda: DataLoader(Stream(4), batch_size=2), 1)[0]
    resumed.load_state_dict(loader.state_dict())
    with (
        pytest.warns(UserWarning, match="cannot go to a position"),
        pytest.raises(RuntimeError, match=r"Stream ended after 4 items while skipping the 6"),
    ):
        list(resumed)


def own_loader(rank, world):
    return shard_dataloader(
        DataLoader(StatefulStream(10 + rank), batch_size=2),
        rank=rank,
        world_size=world,
        stage="fit",
        options=DataOptions(streams="own"),
    )


def save_own(rank, world):
    loader = own_loader(rank, world)
    batches = iter(loader)
    for _ in range(1 + rank):
        next(batches)
    return loader.state_dict()


def load_own(rank, world, state):
    loader = own_loader(rank, world)
    try:
        loader.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return next(iter(loader)).tolist()


def test_streams_of_their_own_keep_a_position_per_rank():
    state = run_ranks(save_own, 2)[0]
    assert run_ranks(load_own, 2, state) == [[2, 3], [4, 5]]
    for text in run_ranks(load_own, 3, state):
        assert "positions of 2 ranks mean nothing on 3" in text


def test_options():
    with pytest.raises(ValueError, match="sharding must be one of"):
        DataOptions(sharding="rows")
    with pytest.raises(ValueError, match="choose one of them"):
        DataOptions(sharding="dispatch", streams="own")


def test_what_is_no_dataloader_is_left_alone():
    numbers = [torch.ones(1)]
    assert shards(lambda: numbers, 2) == [numbers, numbers]
