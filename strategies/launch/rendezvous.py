"""Where processes meet: the store that rank 0 serves, and the process group's start and end."""

from __future__ import annotations

import itertools
import logging
import multiprocessing.util
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from .detect import detect
from .host import visible_devices
from .preflight import Card, describe_process, roll_call, uses_agent_store
from .world import LOOPBACK, LaunchError, World

_log = logging.getLogger(__name__)

_EXPLAIN_AFTER_S = 20.0
_RESOLVE_S = 10.0  # names of new pods and hosts can take seconds to appear
_REFUSE_S = 30.0  # to find rank 0, which may start later
_FAREWELL_S = 5.0  # that rank 0 waits for the others to leave before it ends


@dataclass(frozen=True)
class _Group:
    """The process group that this module has started, with its arguments."""

    world: World
    timeout: timedelta
    device: torch.device | None
    store: dist.Store


_group: _Group | None = None
_world: World | None = None
# By address and port. They live as long as the process, because peers may still ask rank 0's store.
_stores: dict[tuple[str, int], dist.Store] = {}
_listeners: dict[int, socket.socket] = {}  # by port: sockets at which this process will serve
_starts = itertools.count()


def current_world() -> World:
    """Return this process's record, as the last run in it had it or else as detected now.

    Raises:
        LaunchError: the process was started in a way that cannot work.
    """
    return _world or detect(os.environ, visible_devices())


def is_group_of_others() -> bool:
    """Return whether the user, or a tool of the user's, has made the process group."""
    return dist.is_initialized() and _group is None


def refuse(error: LaunchError, start_timeout: timedelta) -> None:
    """Tell the other ranks, which may wait already, why this one does not come; for half a minute.

    Nothing is told where the error does not know this process's rank.
    """
    if error.world is None or error.world.world_size == 1 or dist.is_initialized():
        return
    with suppress(RuntimeError):  # rank 0 is not there
        card = describe_process(error.world, str(error))
        meet(error.world, card, min(start_timeout, timedelta(seconds=_REFUSE_S)))


def meet(world: World, card: Card, timeout: timedelta) -> tuple[str, dict[int, Card], dist.Store]:
    """Hold a roll call where the record says; return as :func:`.roll_call` does."""
    deadline = time.monotonic() + timeout.total_seconds()
    told = f"Rank {world.rank} still waits for the other ranks at {world.meeting_point}."
    timer = threading.Timer(_EXPLAIN_AFTER_S, _log.warning, [told])
    timer.daemon = True
    timer.start()
    # hazard: a store outlives its groups, and a new group would read the addresses of an old one;
    # so each start has a prefix of its own
    try:
        store = dist.PrefixStore(f"zero3 {next(_starts)}", open_store(world, timeout))
        return roll_call(store, world, card, deadline)
    finally:
        timer.cancel()


def start_process_group(
    world: World,
    timeout: timedelta,
    start_timeout: timedelta,
    device: torch.device | None = None,
) -> None:
    """Start the default process group after a roll call, or keep a group that exists already.

    Args:
        world: this process's record.
        timeout: timeout of collectives.
        start_timeout: how long to wait for the other processes.
        device: device of this rank; with it NCCL connects at once, not in the first collective.

    Raises:
        LaunchError: the address does not resolve, the port is taken, ranks are missing, doubled or
            have different versions; or a group exists already and has other ranks.
    """
    global _group, _world
    _world = world
    if dist.is_initialized():
        _require_same_place(world)
        if _group is None or (_group.world.backend, _group.timeout, _group.device) == (
            world.backend,
            timeout,
            device,
        ):
            return
        end_process_group()
    problem, _, store = meet(world, describe_process(world), start_timeout)
    if problem:
        raise LaunchError(problem)
    dist.init_process_group(
        world.backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timeout,
        device_id=device,
    )
    _group = _Group(world, timeout, device, store)
    if world.world_size > 1:  # for tools of the user's; torchrun has set them already
        os.environ.update(MASTER_ADDR=world.main_address, MASTER_PORT=str(world.main_port))
    # Unlike `atexit`, `Finalize` also runs at the end of forked processes.
    multiprocessing.util.Finalize(None, end_process_group, exitpriority=100)


def _require_same_place(world: World) -> None:
    if (dist.get_rank(), dist.get_world_size()) != (world.rank, world.world_size):
        raise LaunchError(
            f"The process group that is there already has this process as rank {dist.get_rank()} of"
            f" {dist.get_world_size()}, but {world.launcher} says rank {world.rank} of"
            f" {world.world_size}. Call torch.distributed.destroy_process_group first, or give the"
            " Trainer as many devices and nodes."
        )


def end_process_group(failed: bool = False) -> None:
    """Destroy the process groups if :func:`start_process_group` made them, the default one last.

    Args:
        failed: whether peers may be in a collective that this process will not join; this process
            then does not wait for them.
    """
    global _group
    group, _group = _group, None
    if group is None or not dist.is_initialized():
        return
    if failed and group.world.backend == "nccl":
        _abort_process_group()
    else:
        dist.destroy_process_group()
    if not failed:
        _say_farewell(group)


def _say_farewell(group: _Group) -> None:
    """Let rank 0, which serves the store, leave last; a dead peer delays it for at most 5 s."""
    world, store = group.world, group.store
    with suppress(RuntimeError):  # the store is gone already
        left = store.add("left", 1)
        deadline = time.monotonic() + _FAREWELL_S
        while world.rank == 0 and left < world.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            left = store.add("left", 0)


# ---- the store -----------------------------------------------------------------------------------


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at ``port``, by default a free one, of this host's loopback.

    Other hosts cannot reach it.
    """
    family = socket.AF_INET6 if address == "::1" else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=2048)


def serve_at(listener: socket.socket) -> int:
    """Let :func:`open_store` of this process, rank 0, serve at ``listener``; return its port."""
    port = listener.getsockname()[1]
    _listeners[port] = listener
    return port


def open_store(world: World, timeout: timedelta) -> dist.Store:
    """Return the store that rank 0, or torchrun, serves at the record's address.

    Each call with the same address returns the same store. A single process has a store in its
    memory, and opens no port.

    Raises:
        LaunchError: the address does not resolve or answer, or the port is taken.
    """
    place = (world.main_address, world.main_port)
    listener = _listeners.pop(world.main_port, None)
    if world.world_size == 1:
        if listener is not None:
            listener.close()
        _stores.setdefault(place, dist.HashStore())
    if place not in _stores:
        _require_resolvable(world)
        try:
            is_server = world.rank == 0 and not uses_agent_store()
            if is_server and listener is None and world.main_address in LOOPBACK:
                # torch would listen on all interfaces. If the port is taken, it says so.
                with suppress(OSError):
                    listener = listen(*place)
            # The store does not wait for the other ranks: it could only count them, while the roll
            # call names those that are missing.
            store: dist.Store = dist.TCPStore(
                *place,
                is_master=is_server,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=listener.detach() if listener is not None else None,
            )
            store.set_timeout(timeout)
        except RuntimeError as error:  # torch's network errors
            raise LaunchError(_explain_network_error(world, str(error), timeout)) from error
        _stores[place] = store
    return _stores[place]


def _require_resolvable(world: World) -> None:
    """Raise :class:`LaunchError` if the main address does not resolve within 10 seconds."""
    deadline = time.monotonic() + _RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(world.main_address, world.main_port)
            return
        except socket.gaierror as error:
            if time.monotonic() >= deadline:
                raise LaunchError(
                    f"Rank {world.rank} on {socket.gethostname()} cannot resolve the host name"
                    f" {world.main_address!r} ({world.because('main_address')}): {error}. Set"
                    " MASTER_ADDR to a name or an IP address of rank 0's host that every node can"
                    " resolve."
                ) from error
            time.sleep(0.5)


def _explain_network_error(world: World, error: str, timeout: timedelta) -> str:
    if "EADDRINUSE" in error:
        return (
            f"Port {world.main_port} ({world.because('main_port')}) is in use on"
            f" {socket.gethostname()}: by another run, or by a second process that takes itself for"
            " rank 0. Set MASTER_PORT to a free port, alike for all ranks (unset it for a run on"
            " one machine), or end the other process."
        )
    hint = ""
    if world.main_address in LOOPBACK and world.node_rank > 0:
        hint = f" {world.main_address} is every host's own address: set MASTER_ADDR to rank 0's."
    return (
        f"Rank {world.rank} on {socket.gethostname()} could not reach rank 0 at"
        f" {world.meeting_point} within {timeout.total_seconds():g} s. Is rank 0 running, and does"
        f" a firewall let the port through?{hint} torch says: {error}"
    )
