"""The roll call before a process group starts: every rank is there once, and all are alike.

If not, all ranks that are there are told what is wrong.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from ..support import printable
from .world import LaunchError, World

Card = dict[str, Any]  # what a process tells of itself

_ANSWER_S = 5.0  # after the deadline, in which rank 0 names the missing ranks
_HEAR_S = 2.0  # in which the others have read the verdict
# the items of a card that must be the same on all ranks
_COMMON_ITEMS = ("torch", "lightning", "lightning_zero3", "backend", "world_size")


def describe_process(world: World, problem: str = "") -> Card:
    """Return this process's card: the items that the roll call compares between ranks.

    Args:
        world: this process's record.
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
        "backend": world.backend,
        # makes cards differ between two processes with the same pid on hosts with the same name
        "born_ns": time.time_ns(),
    }


def package_version(package: str) -> str:
    """Return the version of an installed distribution, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def roll_call(
    store: dist.Store, world: World, card: Card, deadline: float
) -> tuple[str, dict[int, Card], dist.Store]:
    """Wait until every rank is there once, and all are alike; rank 0 compares for all.

    Args:
        store: a store of this start alone, unless it is that of torchrun's agent.
        world: this process's record.
        card: this process's items, by :func:`describe_process`; others may be added.
        deadline: a time of ``time.monotonic``.

    Returns:
        what is wrong, on every rank that is there: ranks are missing, doubled or different, or do
        not come; empty if nothing is. On rank 0 the cards of all that came, by rank. And the part
        of ``store`` that no other start writes to.

    Raises:
        LaunchError: the store is gone.
    """
    cards, answer = {world.rank: card}, _do_nothing
    try:
        if uses_agent_store():
            store, answer = _join_session(store, world, deadline)
        calls = dist.PrefixStore("roll call", store)
        if problem := _post_card(calls, world, card):
            calls.set("problem", problem)
        if world.rank == 0:
            cards |= _collect_cards(calls, world, deadline, answer)
            if calls.check(["problem"]):
                problem = calls.get("problem").decode()
            else:
                problem = _compare(cards, world)
            calls.set("verdict", json.dumps([problem, world.world_size]))
            # hazard: rank 0 serves the store, and the others have yet to read the verdict
            until = time.monotonic() + _HEAR_S
            _wait(lambda: calls.add("heard", 0) >= world.world_size - 1, until, world)
        elif not problem:
            problem = _wait_for_verdict(calls, world, deadline)
    except RuntimeError as error:
        raise LaunchError(
            f"Rank {world.rank} lost its connection to rank 0 at {world.meeting_point} before"
            f" training began; rank 0's own output says why. torch says: {error}"
        ) from error
    # it may quote other processes
    return printable(problem, kept="\n"), cards, store


def uses_agent_store() -> bool:
    """Return whether torchrun's agent serves the store, through all restarts of its workers."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _join_session(
    store: dist.Store, world: World, deadline: float
) -> tuple[dist.Store, Callable[[], None]]:
    """Return the part of the agent's store for this start, and what rank 0 calls while it waits.

    The store still has the addresses of processes that are gone, which a new process that comes
    before its peers would take for theirs. So rank 0 chooses a part that nobody has written to, and
    the others ask it.
    """
    if world.rank == 0:
        session, answered = secrets.token_hex(), 0

        def answer() -> None:
            nonlocal answered
            asked = store.add("sessions asked for", 0)
            for number in range(answered + 1, asked + 1):
                store.set(f"session for {number}", session)
            answered = asked

        return dist.PrefixStore(session, store), answer
    # Each process asks under a new number, so that the answer is for this process and not for one
    # of an earlier start.
    key = f"session for {store.add('sessions asked for', 1)}"
    if _wait(lambda: store.check([key]), deadline, world):
        store = dist.PrefixStore(store.get(key).decode(), store)
    return store, _do_nothing


def _do_nothing() -> None:
    pass


def _post_card(store: dist.Store, world: World, card: Card) -> str:
    """Post this process's card; return the problem if it does not take part, or another has it."""
    if card["problem"]:
        return f"Rank {world.rank} ({_name(card)}) does not come: {card['problem']}"
    text = json.dumps(card, sort_keys=True, default=str)
    posted = store.compare_set(f"rank {world.rank}", "", text).decode()
    if posted == text:
        return ""
    return (
        f"Two processes are rank {world.rank}: {_name(json.loads(posted))} and {_name(card)}."
        f" RANK is set twice alike, or two runs share {world.meeting_point}. Give every process"
        " a rank of its own and every run a port of its own."
    )


def _collect_cards(
    store: dist.Store, world: World, deadline: float, answer: Callable[[], None]
) -> dict[int, Card]:
    """Wait for all ranks' cards, or a problem; return those that came."""
    keys = [f"rank {rank}" for rank in range(world.world_size)]

    def is_done() -> bool:
        answer()
        return store.check(keys) or store.check(["problem"])

    _wait(is_done, deadline, world)
    return {r: json.loads(store.get(key)) for r, key in enumerate(keys) if store.check([key])}


def _compare(cards: dict[int, Card], world: World) -> str:
    """Return which ranks are missing, or the first difference that must not be; else ""."""
    missing = [rank for rank in range(world.world_size) if rank not in cards]
    if missing:
        hosts = sorted({str(card["host"]) for card in cards.values()})
        return (
            f"Ranks {missing} of {world.world_size} ({world.because('world_size')}) did not come to"
            f" {world.meeting_point} in time; ranks {sorted(cards)} did, from {', '.join(hosts)}."
            " Look at the output of the missing ones, or start fewer."
        )
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
    if not _wait(lambda: store.check(["verdict"]), deadline + _ANSWER_S, world):
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


def _name(card: Card) -> str:
    return f"process {card['pid']} on {card['host']}"
