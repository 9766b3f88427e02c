"""Processes that are started again find a part of torchrun's store without the addresses of those
that are gone.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lightning_zero3.strategies.launch.preflight import describe_process, roll_call
from ranks.test_rendezvous import world


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def come(store, rank, world_size, seconds=10.0):
    """What is wrong, and this process's part of the store."""
    who = world(rank, world_size)
    card = describe_process(who)
    problem, _, part = roll_call(store.clone(), who, card, time.monotonic() + seconds)
    return problem, part


def start(store, ranks, world_size):
    """What each rank reads of what each has written, in the order in which they come."""
    with ThreadPoolExecutor(world_size) as pool:
        problems, parts = zip(
            *pool.map(lambda rank: come(store, rank, world_size), ranks), strict=True
        )
    assert not any(problems)
    for rank, part in zip(ranks, parts, strict=True):
        assert not part.check([f"address {rank}"]), "an earlier start wrote here"
        part.set(f"address {rank}", str(rank))
    return [[part.get(f"address {rank}") for rank in sorted(ranks)] for part in parts]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_every_start_is_by_itself(store, order):
    everybody = [[b"0", b"1", b"2"]] * 3
    assert start(store, order, 3) == everybody
    assert start(store, order, 3) == everybody
    assert start(store, [1, 0], 2) == [[b"0", b"1"]] * 2


def test_a_start_that_failed_half_way_does_not_disturb_the_next(store, monkeypatch):
    monkeypatch.setattr("lightning_zero3.strategies.launch.preflight._ANSWER_S", 0.1)
    problem, _ = come(store, 1, 3, seconds=0.2)  # rank 0 never came
    assert "did not answer rank 1" in problem
    problem, start_of_rank_0_alone = come(store, 0, 3, seconds=0.2)
    assert problem.startswith("Ranks [1, 2] of 3")
    start_of_rank_0_alone.set("address 1", "old")
    assert start(store, [2, 0, 1], 3) == [[b"0", b"1", b"2"]] * 3
