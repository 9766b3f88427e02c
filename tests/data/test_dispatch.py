"""Dispatch: rank 0 reads, the others receive, over real processes."""

import dataclasses
from collections import namedtuple

import pytest
import torch
from data.datasets import Indices, StatefulStream, Stream, make_loader, row_major
from torch.utils.data import DataLoader, IterableDataset

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


def test_layout_is_that_of_accelerate():
    results = run_ranks(read, 2, only_rank_zero, "fit", None, None, {}, timeout=20)
    expected = [[[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18]], [[4, 5, 6, 7], [12, 13, 14, 15], [19, 20, 21]]]
    assert [batches for batches, _, _ in results] == expected


@pytest.mark.parametrize("make", [stateful, stateless, shuffled])
@pytest.mark.parametrize("save, load", [(2, 2), (2, 3), (3, 1)])
@pytest.mark.filterwarnings("ignore:.*cannot go to a position")
def test_resume(make, save, load):
    whole = row_major([b for b, _, _ in run_ranks(read, 1, make, "fit", None, None, {}, timeout=20)])
    first = run_ranks(read, save, make, "fit", 2, None, {}, timeout=20)
    handed = row_major([batches for batches, _, _ in first])
    assert handed == whole[: len(handed)]
    rest = run_ranks(read, load, make, "fit", None, first[0][1], {"tail": "balance"}, timeout=20)
    assert row_major([batches for batches, _, _ in rest]) == whole[len(handed) :]


def test_evaluation_and_workers():
    for make, n in ((only_rank_zero, 22), (shuffled, 22), (with_workers, 22)):
        results = run_ranks(read, 3, make, "test", None, None, {}, timeout=20)
        seen = [i for batches, _, _ in results for batch in batches for i in batch]
        assert sorted(seen) == list(range(n))
        assert len({len(batches) for batches, _, _ in results}) == 1


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
    assert "rank 1, fit dataloader (Breaks)" in one and "rank 0, which reads for all ranks" in one and "disk gone" in one
