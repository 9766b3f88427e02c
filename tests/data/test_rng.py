"""Generator states: captured, restored, compared, derived, synchronised."""

import io
import random

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, RandomSampler

from data.datasets import Indices
from data.trainers import plain
from helpers.ranks import run_ranks
from lightning_zero3.strategies.data import DataOptions, shard_dataloader
from lightning_zero3.strategies.support import random_states

pytestmark = pytest.mark.timeout(100)


def differing(a, b):
    """Names of the generators whose states differ."""
    mine, theirs = (tree_map(plain, state) for state in (a, b))
    return [name for name in sorted(a.keys() | b.keys()) if mine.get(name) != theirs.get(name)]


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(()).item(),
    )


def test_restore_repeats_the_draws_also_through_a_weights_only_file():
    random.gauss(0, 1), np.random.randn()  # leave the second number of a pair in both generators
    state = random_states.capture()
    expected = draw()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert differing(loaded, state) == []
    random_states.restore(loaded)
    assert draw() == expected


def test_scoped_leaves_no_trace_and_repeats():
    before = random_states.capture()
    with random_states.scoped(3):
        first = draw()
    with random_states.scoped(3):
        assert draw() == first
    with pytest.raises(KeyError), random_states.scoped():
        draw()
        raise KeyError
    assert differing(before, random_states.capture()) == []


def test_derived_seeds():
    # Reference values of splitmix64 for the sequence that starts at 0, halved.
    assert random_states.derive_seed(0) == 0xE220A8397B1DCDAF >> 1
    seeds = [random_states.derive_seed(a, b) for a in range(100) for b in range(100)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 1 << 63 for seed in seeds)
    assert random_states.derive_seed(1, 2) != random_states.derive_seed(
        2, 1
    ) and random_states.derive_seed(-1) != random_states.derive_seed(1)


def seed_each(rank, world):
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    random_states.seed_rank(7, rank)
    mine = draw()
    states = random_states.gather_states()
    return (
        mine,
        differing(states[rank], random_states.capture()),
        [differing(states[0], s) for s in states],
    )


def test_ranks_get_streams_of_their_own_and_rank_zero_keeps_its_own():
    first, again = run_ranks(seed_each, 3), run_ranks(seed_each, 3)
    assert first == again
    assert all(len({result[0][k] for result in first}) == 3 for k in range(5))
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    assert first[0][0] == draw()
    assert first[1][1] == [] and first[1][2] == [
        [],
        ["numpy", "python", "torch"],
        ["numpy", "python", "torch"],
    ]


def sample_with_own_generator(rank, world):
    generator = torch.Generator().manual_seed(5 + rank)
    loader = DataLoader(
        Indices(1000), batch_size=3, sampler=RandomSampler(Indices(1000), generator=generator)
    )
    loader = shard_dataloader(
        loader, rank=rank, world_size=world, stage="fit", options=DataOptions(seed=1)
    )
    return next(iter(loader)).tolist()


def test_ranks_share_the_seed_of_rank_zeros_generator():
    generator = torch.Generator().manual_seed(5)
    order = list(RandomSampler(Indices(1000), generator=generator))
    assert run_ranks(sample_with_own_generator, 2) == [order[:3], order[3:6]]


def test_a_rank_without_a_state_derives_one():
    torch.manual_seed(8)
    states = [random_states.capture()] * 2
    expected = draw()
    random_states.restore_rank(states, 1, seed=4, step=10)
    assert draw() == expected
    random_states.restore_rank(states, 2, seed=4, step=10)
    drawn = draw()
    random_states.restore_rank(states, 2, seed=4, step=10)
    assert draw() == drawn != expected
