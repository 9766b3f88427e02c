"""Processes that are started again find a part of torchrun's store without the addresses of those
that are gone.
"""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_zero3.strategies.launch.store_session import join_session

TIMEOUT = timedelta(seconds=10)


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def start(store, ranks, world_size, timeout=TIMEOUT):
    """What each rank reads of what each has written, in the order in which they come."""
    with ThreadPoolExecutor(world_size) as pool:
        parts = list(
            pool.map(lambda rank: join_session(store.clone(), rank, world_size, timeout), ranks)
        )
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


def test_a_start_that_failed_half_way_does_not_disturb_the_next(store):
    with pytest.raises(RuntimeError):
        join_session(store.clone(), 1, 3, timedelta(seconds=0.2))  # rank 0 never came
    start_of_rank_0_alone = join_session(store.clone(), 0, 3, timedelta(seconds=0.2))
    start_of_rank_0_alone.set("address 1", "old")
    for thread in threading.enumerate():
        if thread.name == "lightning_zero3.session":
            thread.join()  # as its process is gone
    assert start(store, [2, 0, 1], 3) == [[b"0", b"1", b"2"]] * 3


LEAVES_EARLY = """
import atexit, threading
from datetime import timedelta
atexit.register(lambda: print([t.name for t in threading.enumerate()][1:]))  # the first is called last
import torch.distributed as dist
from lightning_zero3.strategies.launch.store_session import join_session
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
join_session(store, 0, 2, timedelta(seconds=60))  # rank 1 is still to come
assert [t.name for t in threading.enumerate()][1:] == ["lightning_zero3.session"]
"""


def test_no_thread_is_in_the_store_when_the_interpreter_ends():
    """There it would find no interpreter, and torch's C++ end the process with "terminate
    called".
    """
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_EARLY], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
