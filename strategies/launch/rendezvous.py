"""Where processes meet: the store that rank 0 serves, and the process group's start and end."""

from __future__ import annotations

import itertools
import logging
import multiprocessing.util
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from .detect import detect
from .host import visible_devices
from .preflight import describe_process, explained, roll_call
from .store_session import join_session
from .world import LOOPBACK, LaunchError, World

_log = logging.getLogger(__name__)

_RESOLVE_S = 10.0  # names of new pods and hosts can take seconds to appear
_FAREWELL_S = 5.0


@dataclass(frozen=True)
class _Group:
    """The process group that this module started, and what for."""

    world: World
    backend: str
    timeout: timedelta
    device: torch.device | None
    store: dist.Store


_group: _Group | None = None
_world: World | None = None
_stores: dict[tuple[str, int], dist.Store] = {}  # for the life of the process: peers may still ask
_listeners: dict[int, socket.socket] = {}  # by port: where this process will serve
_starts = itertools.count()


def current_world() -> World:
    """This process's record: that of the run which began in it last, or what the variables say
    where none did.

    Raises:
        LaunchError: the process was started in a way that cannot work.
    """
    return _world or detect(os.environ, visible_devices())


def start_process_group(
    world: World,
    backend: str,
    timeout: timedelta,
    start_timeout: timedelta,
    device: torch.device | None = None,
) -> None:
    """Start the default process group after a roll call, or keep the one that is there.

    Args:
        world: who this process is.
        backend: of the group.
        timeout: for collectives.
        start_timeout: how long to wait for the other processes.
        device: of this rank; NCCL then connects at once, instead of in the first collective.

    Raises:
        LaunchError: the address does not resolve, the port is taken, ranks are missing, doubled or
            of different versions; or a group is there already and has other ranks.
    """
    global _group, _world
    _world = world
    if dist.is_initialized():
        _require_same_place(world)
        if _group is None or (_group.backend, _group.timeout, _group.device) == (
            backend,
            timeout,
            device,
        ):
            return
        end_process_group()
    deadline = time.monotonic() + start_timeout.total_seconds()
    # Numbered, because a store outlives its groups, and a new group must not read an old one's
    # addresses.
    store = dist.PrefixStore(f"zero3 {next(_starts)}", open_store(world, start_timeout))
    card = describe_process(world, backend, device)
    roll_call(dist.PrefixStore("roll call", store), world, card, deadline)
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timeout,
        device_id=device,
    )
    _group = _Group(world, backend, timeout, device, store)
    # Unlike `atexit` this also runs at the end of forked processes.
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
    """Destroy the process groups, if :func:`start_process_group` made them; the default one last.

    Args:
        failed: peers may be in a collective that this process will not join: do not wait for them.
    """
    global _group
    group, _group = _group, None
    if group is None or not dist.is_initialized():
        return
    with _without_interrupts():
        if failed and group.backend == "nccl":
            _abort_process_group()
        else:
            dist.destroy_process_group()
        if not failed:
            _say_farewell(group)


def _say_farewell(group: _Group) -> None:
    """Rank 0 serves the store, so it leaves last; a peer that has died is not waited for long."""
    try:
        left = group.store.add("left", 1)
        until = time.monotonic() + _FAREWELL_S
        while group.world.rank == 0 and left < group.world.world_size and time.monotonic() < until:
            time.sleep(0.01)
            left = group.store.add("left", 0)
    except RuntimeError:
        _log.debug("The store was gone already.")


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A second Ctrl-C must not leave half of the groups."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous or signal.SIG_DFL)


# ---- the store
# --------------------------------------------------------------------------------------------------


def listen() -> socket.socket:
    """At a free port, which nobody else can take from then on."""
    dual = (
        {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    )
    return socket.create_server(("", 0), backlog=2048, **dual)


def serve_at(listener: socket.socket) -> int:
    """Its port, where :func:`open_store` of this process, which is rank 0, will serve."""
    port = listener.getsockname()[1]
    _listeners[port] = listener
    return port


def open_store(world: World, timeout: timedelta) -> dist.Store:
    """The store that rank 0 (or torchrun) serves at the record's address; the same one at every
    call.

    Raises:
        LaunchError: the address does not resolve or answer, or the port is taken.
    """
    place = (world.main_address, world.main_port)
    if place not in _stores:
        _require_resolvable(world)
        listener = _listeners.pop(world.main_port, None)
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
        try:
            with explained(
                f"Rank {world.rank} has not reached rank 0 at {world.meeting_point} yet"
            ):
                serves = world.rank == 0 and not served
                left = timeout if serves else _await_server(place, timeout)
                # Does not wait for the others, who could then only be counted; the roll call names
                # them.
                store: dist.Store = dist.TCPStore(
                    *place,
                    is_master=serves,
                    timeout=left,
                    wait_for_workers=False,
                    multi_tenant=True,
                    master_listen_fd=listener.detach() if listener is not None else None,
                )
                store.set_timeout(timeout)
                if served:
                    store = join_session(store, world.rank, world.world_size, timeout)
        except RuntimeError as error:  # torch's network errors
            raise LaunchError(_explain_network_error(world, str(error), timeout)) from error
        _stores[place] = store
    return _stores[place]


def _await_server(place: tuple[str, int], timeout: timedelta) -> timedelta:
    """Wait until somebody listens at ``place``, and return what is left of ``timeout``.

    torch asks once, and again after about half a second if rank 0 was a moment late.
    """
    began = time.monotonic()
    while (gone := time.monotonic() - began) < timeout.total_seconds() - 1:
        try:
            socket.create_connection(place, timeout=1).close()
            break
        except ConnectionRefusedError:
            time.sleep(min(max(0.01, gone / 50), 0.25))
        except OSError:  # torch says what is wrong
            break
    return max(timeout - timedelta(seconds=gone), timedelta(seconds=1))


def _require_resolvable(world: World) -> None:
    until = time.monotonic() + _RESOLVE_S
    while True:
        try:
            socket.getaddrinfo(world.main_address, world.main_port)
            return
        except socket.gaierror as error:
            if time.monotonic() >= until:
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
