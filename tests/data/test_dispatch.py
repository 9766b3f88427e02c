"""Dispatch: rank 0 reads, the others receive, over real processes."""

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from data.datasets import Indices, StatefulStream, Stream, make_loader, row_major
from helpers.ranks import run_ranks
from lightning_zero3.strategies.data import DataOptions, shard_dataloader

pytestmark = pytest.mark.timeout(40)
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str


def nested(samples):
    return {
        "pair": Pair(torch.tensor(samples), torch.zeros(0, 2)),
        "list": [torch.tensor(True), "text", None, 1.5, [], {}],
        "sample": Sample(torch.rand(2, 3, dtype=torch.float64), "name"),
        "bf16": torch.full((3, 2), samples[0], dtype=torch.bfloat16).t(),
    }


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


def stateful_with_workers(rank):
    return make_loader(StatefulStream(22), 2, batch_size=2)


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


def read_with_workers(rank, world):
    """Stops after one row, of which each worker makes its own, and resumes."""
    first, state, _ = read(rank, world, stateful_with_workers, "fit", 1, None, {})
    rest, *_ = read(rank, world, stateful_with_workers, "fit", None, state, {})
    return first, rest


def test_workers_rows_are_dispatched_whole():
    results = run_ranks(read_with_workers, 2, timeout=30)
    assert row_major([first for first, _ in results]) == [0, 2, 4, 6], "of worker 0"
    handed = [i for result in results for batches in result for batch in batches for i in batch]
    # Each worker's last row is filled up.
    assert sorted(set(handed)) == list(range(22)) and len(handed) == 24


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


def read_nested(rank, world):
    loader = DataLoader(Indices(4), batch_size=2, collate_fn=nested)
    options = DataOptions(sharding="dispatch", seed=5)
    (batch,) = shard_dataloader(loader, rank=rank, world_size=world, stage="fit", options=options)
    return batch


def test_any_nesting_is_dispatched():
    for rank, batch in enumerate(run_ranks(read_nested, 2, timeout=30)):
        assert type(batch["pair"]) is Pair and batch["pair"].second.shape == (0, 2)
        assert batch["pair"].first.tolist() == [2 * rank, 2 * rank + 1]
        assert batch["list"][0].item() is True and batch["list"][1:] == ["text", None, 1.5, [], {}]
        assert batch["sample"].name == "name" and batch["sample"].x.dtype == torch.float64
        assert torch.equal(batch["bf16"], torch.full((2, 3), 2 * rank, dtype=torch.bfloat16))


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
