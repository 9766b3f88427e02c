"""Processes that meet, and what they say when they cannot: on every process that is there, and long
before a time-out.
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.ranks import free_port, run_ranks
from lightning_zero3.strategies.launch import rendezvous
from lightning_zero3.strategies.launch.detect import detect
from lightning_zero3.strategies.launch.preflight import _compare, describe_process, roll_call
from lightning_zero3.strategies.launch.rendezvous import (
    current_world,
    end_process_group,
    listen,
    serve_at,
    start_process_group,
)
from lightning_zero3.strategies.launch.world import Devices, LaunchError

SOON_S = 10  # what all of these take together at most; the shortest time-out in a message is longer
HOST = socket.gethostname()


def world(rank, size, port=77, address="127.0.0.1"):
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environ = {**local, "MASTER_ADDR": address, "MASTER_PORT": port}
    return detect({name: str(value) for name, value in environ.items()}, Devices())


def call(cards, seconds=SOON_S):
    """A roll call of threads, each with `(rank, world size, changes to its card)`; the message of
    each, or None.
    """
    store = dist.HashStore()

    def one(rank, size, changes):
        who = world(rank, size)
        card = {**describe_process(who), **changes}
        return roll_call(store, who, card, time.monotonic() + seconds)[0] or None

    with ThreadPoolExecutor(len(cards)) as pool:
        return list(pool.map(one, *zip(*cards, strict=True)))


def test_all_there_and_alike():
    assert call([(0, 3, {}), (1, 3, {}), (2, 3, {})]) == [None] * 3


UNLIKE = {
    "torch": ({"torch": "2.11.0"}, "has torch 2.11.0, but rank 0 ("),
    "lightning_zero3": ({"lightning_zero3": "0.0.9"}, "has lightning_zero3 0.0.9, but rank 0 ("),
    "backend": ({"backend": "nccl"}, "has backend nccl, but rank 0 ("),
}


@pytest.mark.parametrize("item", UNLIKE)
def test_another_version_on_another_node_is_named_on_every_rank(item):
    changes, expected = UNLIKE[item]
    messages = call([(0, 3, {}), (1, 3, {"host": "node7", "pid": 5, **changes}), (2, 3, {})])
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"Rank 1 (process 5 on node7) {expected}")


def test_a_version_that_tells_less_is_named():
    cards = {rank: describe_process(world(rank, 2)) for rank in range(2)}
    del cards[1]["lightning"]
    assert "has lightning None, but rank 0 (" in _compare(cards, world(0, 2))


def test_a_doubled_rank_is_named_on_every_rank():
    messages = call([(0, 3, {}), (1, 3, {"host": "node1"}), (1, 3, {"host": "node2"})])
    assert all("Two processes are rank 1: process " in m for m in messages if m is not None)
    # The one that came first may have heard the verdict before; rank 0 and the second always hear
    # of it.
    assert messages[0] is not None and "node1" in messages[0] and "node2" in messages[0]


def test_what_other_ranks_say_does_not_write_to_the_terminal():
    messages = call([(0, 2, {}), (1, 2, {"host": "\x1b[2Jnode\r", "torch": "2\x07"})])
    assert all("on \\x1b[2Jnode\\r) has torch 2\\x07, but" in message for message in messages)


def test_missing_ranks_are_named():
    messages = call([(0, 4, {}), (2, 4, {})], seconds=0.3)
    assert all(
        m.startswith("Ranks [1, 3] of 4 (WORLD_SIZE=4) did not come to 127.0.0.1:77 (MASTER_ADDR=")
        for m in messages
    )


def test_another_world_size_is_named():
    messages = call([(0, 2, {}), (1, 3, {})])
    assert all("has world_size 3, but rank 0" in m for m in messages)


def refusal(who, seconds=SOON_S):
    with pytest.raises(LaunchError) as caught:
        start_process_group(who, timedelta(seconds=60), timedelta(seconds=seconds))
    assert not dist.is_initialized()
    return str(caught.value)


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        message = refusal(world(0, 2, port))
        assert time.monotonic() - started < SOON_S
    assert (
        message.startswith(f"Port {port} (MASTER_PORT={port}) is in use on {HOST}: ")
        and "Set MASTER_PORT" in message
    )


def test_a_host_that_does_not_resolve_is_named(monkeypatch):
    monkeypatch.setattr("lightning_zero3.strategies.launch.rendezvous._RESOLVE_S", 0.1)
    message = refusal(world(1, 2, address="no-such-host.invalid"))
    assert (
        "cannot resolve the host name 'no-such-host.invalid' (MASTER_ADDR=no-such-host.invalid)"
        in message
    )


def test_a_rank_that_is_not_there_is_named():
    assert refusal(world(0, 2, free_port()), seconds=0.5).startswith(
        "Ranks [1] of 2 (WORLD_SIZE=2) did not come to 127.0.0.1"
    )
    port = free_port()
    message = refusal(world(1, 2, port), seconds=1)
    assert message.startswith(
        f"Rank 1 on {HOST} could not reach rank 0 at 127.0.0.1:{port} (MASTER_ADDR=127.0.0.1;"
        " MASTER_P"
    )


def total(rank):
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("is_given", [False, True], ids=["our port", "a given port"])
def test_a_run_on_one_host_cannot_be_reached_from_others(address, is_given, monkeypatch):
    monkeypatch.setattr(rendezvous, "_stores", {})
    port = free_port() if is_given else serve_at(listen(address))
    store = rendezvous.open_store(world(0, 2, port, address), timedelta(seconds=SOON_S))
    other = rendezvous.open_store(world(1, 2, port, address), timedelta(seconds=SOON_S))
    other.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):  # another address of this host
        socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_single_process_opens_no_port(monkeypatch):
    monkeypatch.setattr(dist, "TCPStore", None)
    port = serve_at(listen("127.0.0.1"))
    for address in ("127.0.0.1", "no-such-host.invalid"):
        store = rendezvous.open_store(world(0, 1, port, address), timedelta(seconds=SOON_S))
        assert store.add("key", 1) == 1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def port_that_nobody_else_can_take(rank):
    box = [serve_at(listen("127.0.0.1")) if rank == 0 else None]
    dist.broadcast_object_list(box)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("", box[0]))
    return box[0]


def groups(rank, size, folder):
    """Starts and ends groups; rank 1 comes late to each end. Whether it had come when rank 0 went
    on after an end.
    """
    port = port_that_nobody_else_can_take(rank)
    assert current_world().launcher == "torchrun"  # what the variables say, before any run
    dist.destroy_process_group()  # the test's own
    who, minute = world(rank, size, port), timedelta(seconds=60)
    sums, had_come = [], []
    for number, (timeout, end) in enumerate(
        ((minute, None), (minute, None), (minute / 2, {"failed": True}), (minute, {}))
    ):
        before = dist.group.WORLD
        start_process_group(who, timeout, minute)
        assert current_world() == who
        sums.append(total(rank))
        if number == 1:
            assert dist.group.WORLD is before  # the same request keeps the group
        elif number == 2:
            assert dist.group.WORLD is not before
        dist.new_group(list(range(size)))  # ends with the others
        if end is not None:
            gone, late = Path(folder, f"gone {number}"), Path(folder, f"late {number}")
            if rank == 1:
                while end and not gone.exists():  # for ever, if rank 0 waits for this one
                    time.sleep(0.01)
                time.sleep(0.2)
                late.touch()
            end_process_group(**end)
            had_come.append(late.exists())
            gone.touch()
            assert not dist.is_initialized()
    # A group of the user's is left alone, if it has this process in its place.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(LaunchError, match=r"as rank 0 of 1, but variables says rank \d of 2"):
        start_process_group(who, minute, minute)
    end_process_group()
    assert dist.is_initialized()
    return sums, had_come


def test_groups_start_again_and_end(tmp_path):
    # Rank 0 serves the store and leaves last; after a failure nobody waits.
    assert run_ranks(groups, 2, str(tmp_path), timeout=60) == [
        ([3.0] * 4, [False, True]),
        ([3.0] * 4, [True, True]),
    ]


def test_device_times_and_backend_reach_the_process_group(monkeypatch):
    asked = {}
    monkeypatch.setattr(rendezvous, "_world", None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *args, **options: asked.update(options, backend=args)
    )
    who, device = world(0, 1, free_port()), torch.device("meta", 0)
    try:
        start_process_group(who, timedelta(seconds=41), timedelta(seconds=SOON_S), device)
    finally:
        end_process_group()
    assert asked.pop("store") is not None
    assert asked == {
        "backend": ("gloo",),
        "rank": 0,
        "world_size": 1,
        "timeout": timedelta(seconds=41),
        "device_id": device,
    }


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("failed", [False, True])
def test_nccl_alone_is_aborted_after_a_failure(monkeypatch, backend, failed):
    ends = []
    monkeypatch.setattr(rendezvous, "_abort_process_group", lambda: ends.append("aborted"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ends.append("destroyed"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    store = dist.HashStore()
    group = rendezvous._Group(
        replace(world(0, 1), backend=backend), timedelta(seconds=1), None, store
    )
    monkeypatch.setattr(rendezvous, "_group", group)
    end_process_group(failed)
    end_process_group(failed)  # nothing is left to end
    assert ends == ["aborted" if failed and backend == "nccl" else "destroyed"]
    assert store.check(["left"]) != failed  # nobody says farewell to ranks that may not come


def on_gpus(rank, size, port):
    dist.destroy_process_group()
    who, minute = replace(world(rank, size, port), backend="nccl"), timedelta(seconds=60)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    found = []
    for end in ({}, {"failed": True}, {}):
        start_process_group(who, minute, minute, device)
        x = torch.full((3,), rank + 1.0, device=device)
        dist.all_reduce(x)
        found.append(x.tolist())
        dist.new_group(list(range(size)))
        end_process_group(**end)
        assert not dist.is_initialized()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nccl_groups_start_again_and_end():
    (found,) = run_ranks(on_gpus, 1, free_port())
    assert found == [[1.0] * 3] * 3


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_groups_of_two():
    for found in run_ranks(on_gpus, 2, free_port()):
        assert found == [[3.0] * 3] * 3
