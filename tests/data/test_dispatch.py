"""Dispatch: rank 0 reads, the others receive, over real processes."""

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from data.datasets import Indices, StatefulStream, Stream, make_loader, row_major
from helpers.ranks import run_ranks
from lightning_zero3.strategies.data import DataOptions, shard_dataloader
from lightning_zero3.strategies.data.dispatch import pack, unpack

pytestmark = pytest.mark.timeout(40)
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str


def test_a_batch_is_unpacked_as_it_was_packed():
    batch = {
        "pair": Pair(torch.arange(3), torch.zeros(0, 2)),
        "list": [torch.tensor(True), "text", None, 1.5, [], {}],
        "sample": Sample(torch.rand(2, 3, dtype=torch.float64), "name"),
        "bf16": torch.ones(3, dtype=torch.bfloat16).t(),
    }
    structure, buffer = pack(batch)
    import pickle

    back = unpack(pickle.loads(structure), buffer)
    assert type(back["pair"]) is Pair and back["list"][1:] == ["text", None, 1.5, [], {}]
    assert torch.equal(back["pair"].first, torch.arange(3)) and back["pair"].second.shape == (0, 2)
    assert torch.equal(back["sample"].x, batch["sample"].x) and back["sample"].name == "name"
    assert back["bf16"].dtype == torch.bfloat16 and back["list"][0].item() is True


class OnlyOnRankZero(IterableDataset):
    """A stream that a second process could not open."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def __iter__(self):
        assert self.rank == 0
        yield from range(self.size)


def read(rank, world, make, stage, stop, state, options):
    options = DataOptions(**{"sharding": "dispatch", "seed": 5, **options})
    loader = shard_dataloader(make(rank), rank=rank, world_size=world, stage=stage, options=options)
    if state is not None:
        loader.load_state_dict(state)
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == stop:
            break
    return batches, loader.state_dict(), loader.batches_per_rank


def only_rank_zero(rank):
    return DataLoader(OnlyOnRankZero(rank, 22), batch_size=4)


def stateful(rank):
    return DataLoader(StatefulStream(22), batch_size=2)


def stateless(rank):
    return DataLoader(Stream(22, length=True), batch_size=2)


def shuffled(rank):
    return DataLoader(Indices(22), batch_size=2, shuffle=True)


def with_workers(rank):
    return make_loader(Stream(22), 2, batch_size=2)


RESUMED = [stateful, stateless, shuffled]
EVALUATED = [only_rank_zero, shuffled, with_workers]


def read_all(rank, world, states):
    """Every dispatched loader to its end, to its second batch, and from the states of runs that
    stopped there.
    """
    whole = {
        make.__name__: read(rank, world, make, "fit", None, None, {})[0]
        for make in (only_rank_zero, *RESUMED)
    }
    stopped = {make.__name__: read(rank, world, make, "fit", 2, None, {})[:2] for make in RESUMED}
    rest = {}
    for (name, saved_by), state in states.items():
        make = next(make for make in RESUMED if make.__name__ == name)
        rest[name, saved_by] = read(rank, world, make, "fit", None, state, {"tail": "balance"})[0]
    evaluated = {
        make.__name__: read(rank, world, make, "test", None, None, {})[0] for make in EVALUATED
    }
    return whole, stopped, rest, evaluated


@pytest.mark.filterwarnings("ignore:.*cannot go to a position")
def test_dispatched_loaders_and_their_resumes():
    states, handed = {}, {}
    for world in (2, 3):
        for name, ranks in by_name(run_ranks(read_all, world, {}, timeout=30), 1).items():
            handed[name, world] = row_major([batches for batches, _ in ranks])
            states[name, world] = ranks[0][1]
    alone = run_ranks(read_all, 1, {}, timeout=30)[0][0]
    for world in (1, 2, 3):
        results = run_ranks(read_all, world, states, timeout=30)
        for (name, saved_by), ranks in by_name(results, 2).items():
            done = len(handed[name, saved_by])
            assert handed[name, saved_by] == row_major([alone[name]])[:done]
            assert row_major(ranks) == row_major([alone[name]])[done:], (name, saved_by, world)
        for ranks in by_name(results, 3).values():
            assert (
                sorted(row_major(ranks)) == list(range(22))
                and len({len(batches) for batches in ranks}) == 1
            )


def by_name(results, part):
    """Of each loader: what every rank found."""
    return {name: [result[part][name] for result in results] for name in results[0][part]}


class Breaks(IterableDataset):
    def __iter__(self):
        yield from range(6)
        raise OSError("disk gone")


def broken(rank):
    return DataLoader(Breaks(), batch_size=1)


def read_and_report(rank, world):
    try:
        read(rank, world, broken, "fit", None, None, {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_an_error_on_rank_zero_reaches_everybody():
    zero, one = run_ranks(read_and_report, 2, timeout=20)
    assert zero == "OSError: disk gone"
    assert (
        "rank 1, fit dataloader (Breaks)" in one
        and "rank 0, which reads for all ranks" in one
        and "disk gone" in one
    )
