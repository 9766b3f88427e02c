"""The roll call before a process group starts: every rank is there once, and all are alike.

If not, all ranks that are there raise an error that says what is wrong.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from .world import LaunchError, World

_log = logging.getLogger(__name__)

_EXPLAIN_AFTER_S = 20.0
# the items of a card that must be the same on all ranks
_COMMON_ITEMS = ("torch", "lightning", "lightning_zero3", "backend", "world_size")


def describe_process(world: World, backend: str, problem: str = "") -> dict[str, object]:
    """Return this process's card: the items that the roll call compares between ranks.

    Args:
        world: this process's record.
        backend: backend of the process group.
        problem: why this process will not take part, which ends the roll call.
    """
    return {
        "problem": problem,
        "rank": world.rank,
        "world_size": world.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "torch": torch.__version__,
        "lightning": package_version("lightning"),
        "lightning_zero3": package_version("lightning-zero3"),
        "backend": backend,
        # makes cards differ between two processes with the same pid on hosts with the same name
        "born_ns": time.time_ns(),
    }


def package_version(package: str) -> str:
    """Return the version of an installed distribution, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def roll_call(store: dist.Store, world: World, card: dict[str, object], deadline: float) -> None:
    """Wait until every rank is there once, and all are alike; rank 0 compares for all.

    Args:
        store: a store of this roll call alone.
        world: this process's record.
        card: this process's items, by :func:`describe_process`.
        deadline: a time of ``time.monotonic``.

    Raises:
        LaunchError: ranks are missing, doubled or different; on every rank that is there.
    """
    try:
        _post_card(store, world, card)
        if world.rank == 0:
            problem = _check_ranks(store, world, deadline)
            store.set("verdict", json.dumps([problem, world.world_size]))
        else:
            problem = _wait_for_verdict(store, world, deadline)
    except RuntimeError as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(
            f"Rank {world.rank} lost its connection to rank 0 at {world.meeting_point} before"
            f" training began; rank 0's own output says why. torch says: {error}"
        ) from error
    if problem:
        if world.rank == 0:
            # hazard: rank 0 serves the store, and the others have yet to read the verdict
            _wait(
                lambda: store.add("heard", 0) >= world.world_size - 1, time.monotonic() + 1, world
            )
        raise LaunchError(problem)


def _post_card(store: dist.Store, world: World, card: dict[str, object]) -> None:
    """Post this process's card.

    Raises:
        LaunchError: another process has this rank, or this one will not take part.
    """
    if card["problem"]:
        problem = f"Rank {world.rank} ({_name(card)}) does not come: {card['problem']}"
    else:
        text = json.dumps(card, sort_keys=True)
        posted = store.compare_set(f"rank {world.rank}", "", text).decode()
        if posted == text:
            return
        problem = (
            f"Two processes are rank {world.rank}: {_name(json.loads(posted))} and {_name(card)}."
            f" RANK is set twice alike, or two runs share {world.meeting_point}. Give every process"
            " a rank of its own and every run a port of its own."
        )
    store.set("problem", problem)
    if world.rank or not card["problem"]:  # rank 0 tells the others first
        raise LaunchError(problem)


def _check_ranks(store: dist.Store, world: World, deadline: float) -> str:
    """Wait for all ranks' cards and compare them; return the problem, empty if there is none."""
    ranks = range(world.world_size)
    with explained(f"Not all of {world.world_size} ranks have come to {world.meeting_point}"):
        is_complete = _wait(
            lambda: store.check([f"rank {r}" for r in ranks]) or store.check(["problem"]),
            deadline,
            world,
        )
    if store.check(["problem"]):
        return store.get("problem").decode()
    present = [r for r in ranks if store.check([f"rank {r}"])]
    cards = {r: json.loads(store.get(f"rank {r}")) for r in present}
    if not is_complete:
        missing = [r for r in ranks if r not in cards]
        hosts = sorted({str(card["host"]) for card in cards.values()})
        return (
            f"Ranks {missing} of {world.world_size} ({world.because('world_size')}) did not come to"
            f" {world.meeting_point} in time; ranks {present} did, from {', '.join(hosts)}. Look at"
            " the output of the missing ones, or start fewer."
        )
    return _compare(cards)


def _compare(cards: dict[int, dict[str, object]]) -> str:
    """Return the first difference between ``cards``, by rank, that must not be; empty if none."""
    first = cards[0]
    for rank, card in cards.items():
        for item in _COMMON_ITEMS:
            value = card.get(item)  # a rank with another version of zero3 may lack the item
            if value != first[item]:
                return (
                    f"Rank {rank} ({_name(card)}) has {item} {value}, but rank 0 ({_name(first)})"
                    f" has {first[item]}. All ranks need the same: install it alike on every node,"
                    " or correct the launch command."
                )
    return ""


def _wait_for_verdict(store: dist.Store, world: World, deadline: float) -> str:
    """Wait for rank 0's verdict; return the problem, empty if there is none."""
    with explained(f"Rank {world.rank} waits for the other ranks at {world.meeting_point}"):
        # Rank 0 has the same deadline and then names the missing ranks, which takes it a moment.
        if not _wait(lambda: store.check(["verdict"]), deadline + 5, world):
            return (
                f"Rank 0 at {world.meeting_point} did not answer rank {world.rank}. Rank 0's output"
                " says why."
            )
    problem, world_size = json.loads(store.get("verdict"))
    store.add("heard", 1)
    if not problem and world_size != world.world_size:
        return (
            f"Rank {world.rank} counts {world.world_size} processes"
            f" ({world.because('world_size')}), rank 0 {world_size}."
        )
    return problem


def _wait(is_done: Callable[[], bool], deadline: float, world: World) -> bool:
    """Poll until ``is_done``; return False if ``deadline`` passes before."""
    begin = time.monotonic()
    min_pause = max(0.002, 1e-4 * world.world_size)  # all ranks poll one store
    while not is_done():
        now = time.monotonic()
        if now >= deadline:
            return False
        time.sleep(min(max(min_pause, (now - begin) / 50), 0.25))  # loses at most 2% of the wait
    return True


def _name(card: dict[str, object]) -> str:
    return f"process {card['pid']} on {card['host']}"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Log ``what`` this process waits for if the block takes long."""
    timer = threading.Timer(
        _EXPLAIN_AFTER_S, _log.warning, [f"{what}, after {_EXPLAIN_AFTER_S:g} s; still trying."]
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
