"""Index for index what Accelerate gives each process: vectors made by it, and random cases run
beside it.
"""

import json
import random
from functools import partial
from pathlib import Path

import pytest
from accelerate.data_loader import prepare_data_loader
from accelerate.state import PartialState
from torch.utils.data import DataLoader

from data.datasets import Indices, Stream, as_list, shards
from helpers.ranks import run_ranks
from lightning_zero3.strategies.data import (
    DataOptions,
    NoBatch,
    shard_dataloader,
)

pytestmark = [
    pytest.mark.timeout(120),
]
VECTORS = json.loads((Path(__file__).parent / "vectors" / "accelerate.json").read_text())["vectors"]
PREPARED = (
    "prepare_map",
    "shard_iterable",
    "seedable_shuffle",
)


def vectors(*kinds):
    return [v for v in VECTORS if v["kind"].startswith(kinds)]


def user_loader(vector):
    """The loader that was given to Accelerate."""
    n, kwargs = vector["n"], {"batch_size": vector["batch_size"], "drop_last": vector["drop_last"]}
    if "iterable" in vector["kind"]:
        return DataLoader(Stream(n, length="nolen" not in vector["kind"]), **kwargs)
    return DataLoader(Indices(n), shuffle=vector["shuffle"], **kwargs)


def options_of(config, sharding=None):
    """Accelerate's choices as ours."""
    split = "split" if config.get("split_batches") else "batch"
    tail = "wrap" if config.get("even_batches", True) else "uneven"
    if sharding == "dispatch":
        tail = "level"
    return {
        "sharding": sharding or split,
        "tail": tail,
        "exact_evaluation": False,
        "seed": config.get("data_seed", 0),
    }


def epochs(loader, count):
    found = []
    for epoch in range(count):
        loader.set_epoch(epoch)
        found.append([as_list(batch) for batch in loader if not isinstance(batch, NoBatch)])
    return found


@pytest.mark.parametrize("vector", vectors(*PREPARED), ids=lambda v: v["id"])
def test_prepared_loaders(vector):
    # The stage is test, because in training we refuse ranks with different numbers of batches.
    loaders = shards(
        lambda: user_loader(vector), vector["world"], "test", **options_of(vector["config"])
    )
    expected = vector["per_process"]
    for rank, loader in enumerate(loaders):
        assert epochs(loader, len(expected[rank])) == expected[rank]
        if vector["len"][rank] is not None:
            assert len(loader) == vector["len"][rank]


@pytest.mark.parametrize("vector", vectors("SeedableRandomSampler"), ids=lambda v: v["id"])
def test_samplers(vector):
    make = lambda: DataLoader(Indices(vector["n"]), batch_size=vector["n"], shuffle=True)  # noqa: E731
    (loader,) = shards(make, 1, seed=vector["data_seed"])
    assert [batches[0] for batches in epochs(loader, 3)] == vector["epochs_0_1_2"]


def read_dispatched(rank, world):
    found = {}
    for vector in vectors("dispatch"):
        if vector["world"] == world:
            split = world if vector["config"].get("split_batches") else 1
            loader = user_loader({**vector, "batch_size": vector["batch_size"] // split})
            options = DataOptions(**options_of(vector["config"], "dispatch"))
            loader = shard_dataloader(
                loader, rank=rank, world_size=world, stage="test", options=options
            )
            found[vector["id"]] = epochs(loader, len(vector["per_process"][rank]))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_dispatched_loaders(world):
    expected = {v["id"]: v["per_process"] for v in vectors("dispatch") if v["world"] == world}
    results = run_ranks(read_dispatched, world, timeout=30)
    assert {key: [result[key] for result in results] for key in results[0]} == expected
    assert len(expected) >= 8


def random_case(rng):
    """A loader's arguments and Accelerate's choices."""
    world, batch, split = rng.randint(2, 6), rng.randint(1, 5), rng.random() < 0.3
    case = {
        "world": world,
        "n": rng.randint(1, 70),
        "batch_size": batch * world if split else batch,
        "drop_last": rng.random() < 0.3,
        "kind": rng.choice(["sequential", "seedable", "stream"]),
        "config": {
            "split_batches": split,
            "even_batches": rng.random() < 0.6,
            "data_seed": rng.randint(0, 99),
        },
    }
    if case["kind"] == "stream":
        case["config"]["even_batches"] = True  # Accelerate knows no other end of a stream
    return case


def make_loader(case):
    kwargs = {"batch_size": case["batch_size"], "drop_last": case["drop_last"]}
    if case["kind"] == "stream":
        return DataLoader(Stream(case["n"]), **kwargs)
    return DataLoader(Indices(case["n"]), shuffle=case["kind"] == "seedable", **kwargs)


def by_accelerate(case, rank):
    config = case["config"]
    loader = prepare_data_loader(
        make_loader(case),
        num_processes=case["world"],
        process_index=rank,
        split_batches=config["split_batches"],
        even_batches=config["even_batches"],
        use_seedable_sampler=case["kind"] == "seedable",
        data_seed=config["data_seed"],
    )
    found = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        found.append([as_list(batch) for batch in loader])
    return found


def test_random_cases():
    rng = random.Random(1)
    PartialState(cpu=True)
    for number in range(600):
        case = random_case(rng)
        loaders = shards(
            partial(make_loader, case), case["world"], "test", **options_of(case["config"])
        )
        for rank, loader in enumerate(loaders):
            assert epochs(loader, 2) == by_accelerate(case, rank), (
                number,
                rank,
                case,
            )


def dispatch_beside_accelerate(rank, world):
    """Random loaders, read by both; returns the cases in which they differ."""
    rng, differing = random.Random(3), []
    PartialState(cpu=True)
    for _ in range(60):
        case = {
            **random_case(rng),
            "world": world,
            "kind": rng.choice(["sequential", "stream"]),
        }
        case["batch_size"] = rng.randint(1, 5)
        # with less than one step Accelerate broadcasts None
        case["n"] += case["drop_last"] * world * case["batch_size"]
        theirs = prepare_data_loader(make_loader(case), dispatch_batches=True, put_on_device=True)
        options = DataOptions(**options_of(case["config"], "dispatch"))
        ours = shard_dataloader(
            make_loader(case), rank=rank, world_size=world, stage="test", options=options
        )
        found = [as_list(batch) for batch in ours], [as_list(batch) for batch in theirs]
        if found[0] != found[1]:
            differing.append((case, *found))
    return differing


@pytest.mark.parametrize("world", [2, 3])
def test_random_dispatched_cases(world):
    assert run_ranks(dispatch_beside_accelerate, world, timeout=60) == [[]] * world
