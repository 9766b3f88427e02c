"""Generator states: captured, restored, compared, derived, synchronised."""

import io
import random

import numpy as np
import pytest
import torch

from helpers.ranks import run_ranks
from lightning_zero3.strategies import rng

pytestmark = pytest.mark.timeout(100)


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()


def test_restore_repeats_the_draws_also_through_a_weights_only_file():
    random.gauss(0, 1), np.random.randn()  # leave the second number of a pair in both generators
    state = rng.capture()
    expected = draw()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert rng.differing(loaded, state) == []
    rng.restore(loaded)
    assert draw() == expected


def test_differing_names_the_generators():
    before = rng.capture()
    torch.rand(()), random.random()
    assert rng.differing(before, rng.capture()) == ["python", "torch"]


def test_scoped_leaves_no_trace_and_repeats():
    before = rng.capture()
    with rng.scoped(3):
        first = draw()
    with rng.scoped(3):
        assert draw() == first
    with pytest.raises(KeyError), rng.scoped():
        draw()
        raise KeyError
    assert rng.differing(before, rng.capture()) == []


def test_derived_seeds():
    # Reference values of splitmix64 for the sequence that starts at 0, halved.
    assert rng.derive_seed(0) == 0xE220A8397B1DCDAF >> 1
    seeds = [rng.derive_seed(a, b) for a in range(100) for b in range(100)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 1 << 63 for seed in seeds)
    assert rng.derive_seed(1, 2) != rng.derive_seed(2, 1) and rng.derive_seed(-1) != rng.derive_seed(1)


def seed_each(rank, world):
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    rng.seed_rank(7, rank)
    mine = draw()
    states = rng.gather_states()
    return mine, rng.differing(states[rank], rng.capture()), [rng.differing(states[0], s) for s in states]


def test_ranks_get_streams_of_their_own_and_rank_zero_keeps_its_own():
    first, again = run_ranks(seed_each, 3), run_ranks(seed_each, 3)
    assert first == again
    assert all(len({result[0][k] for result in first}) == 3 for k in range(5))
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    assert first[0][0] == draw()
    assert first[1][1] == [] and first[1][2] == [[], ["numpy", "python", "torch"], ["numpy", "python", "torch"]]


def synchronize_some(rank, world, types):
    torch.manual_seed(100 + rank), random.seed(rank)
    generator = torch.Generator().manual_seed(5 + rank)
    rng.synchronize(types, generator=generator)
    return torch.rand(()).item(), random.random(), torch.randint(0, 1000, (3,), generator=generator).tolist()


def test_synchronize():
    zero, one = run_ranks(synchronize_some, 2, ("torch", "generator"))
    # Accelerate's vector for the same seeds: rank 0's numbers on both ranks.
    assert zero[0] == one[0] == 0.1116642951965332 and zero[2] == one[2] == [411, 814, 767]
    assert zero[1] != one[1]
    zero, one = run_ranks(synchronize_some, 2, ("generator",))
    assert zero[0] != one[0] and zero[2] == one[2]
    with pytest.raises(ValueError, match="rng_types must be among"):
        rng.synchronize(("dropout",))


def test_another_world_size_derives_and_says_so():
    states = [rng.capture()] * 2
    told = rng.restore_rank(states, 1, 3, seed=4, step=10)
    drawn = draw()
    assert "2 ranks, this run has 3" in told and "seed=4" in told
    rng.restore_rank(states, 1, 3, seed=4, step=10)
    assert draw() == drawn
    assert rng.restore_rank(states, 1, 2, seed=4, step=10) is None
