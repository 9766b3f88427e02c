"""The door between ranks of one machine: memory that all of them map, in place of messages.

A rank puts what it has to give into a block of its own and posts the exchange on its board; the others copy, or add, straight
from there. Results are bitwise those of :class:`~.collectives.PairwiseCollectives`. A block is written again only when every
rank has said, exchange by exchange, that it has read it.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Meeting, PairwiseCollectives, Pending

_RING = 512  # exchanges that can be told apart; far fewer are ever in flight
_POSTED, _LABELS, _PLACES, _DONE = 0, 1, 1 + _RING, 1 + 2 * _RING  # words of a board
_BOARD_BYTES = 8 * (1 + 3 * _RING)
_SPINS = 100  # looks without sleeping
_LOOK_S = 0.1  # between two looks at whether the other process lives
_ALIGNMENT = 64
_SLACK = 1 << 16  # for agreements, and for what alignment takes


class Board:
    """What each rank has posted and what it is done with; each writes its own, all read all.

    Args:
        words: the boards [int64] in rank order.
        rank: of this process.
        processes: ids, in rank order.
        timeout_s: after which waiting is an error.
    """

    def __init__(self, words: list[memoryview], rank: int, processes: list[int], timeout_s: float) -> None:
        self._words, self._mine, self._rank, self._processes = words, words[rank], rank, processes
        self._timeout_s = timeout_s

    def post(self, label: int, place: int = 0) -> int:
        """Say that this rank has come to an exchange, and where in its block it gives; returns the exchange's number."""
        number = self._mine[_POSTED] + 1
        self._mine[_LABELS + number % _RING] = label
        self._mine[_PLACES + number % _RING] = place
        self._mine[_POSTED] = number  # last: on x86 stores are seen in this order
        return number

    def posted(self, rank: int, number: int) -> tuple[int, int]:
        """Wait until ``rank`` has come to exchange ``number``; returns its label and place."""
        self._wait(rank, _POSTED, number)
        words = self._words[rank]
        return words[_LABELS + number % _RING], words[_PLACES + number % _RING]

    def finish(self, number: int) -> None:
        """Say that this rank has read all it needs of exchange ``number``."""
        self._mine[_DONE + number % _RING] = number

    def wait_until_read(self, number: int) -> None:
        """Until every rank has finished exchange ``number``."""
        for rank in range(len(self._words)):
            if rank != self._rank:
                self._wait(rank, _DONE + number % _RING, number)

    def _wait(self, rank: int, word: int, value: int) -> None:
        words = self._words[rank]
        if words[word] >= value:
            return
        for _ in range(_SPINS):
            os.sched_yield()
            if words[word] >= value:
                return
        began = looked = time.monotonic()
        pause = 2e-5
        while words[word] < value:
            time.sleep(pause)
            pause = min(1.5 * pause, 1e-3)
            now = time.monotonic()
            if now - looked > _LOOK_S:
                looked = now
                self._require_alive(rank)
            if now - began > self._timeout_s:
                raise RuntimeError(f"Rank {self._rank} timed out: rank {rank} did not come in {self._timeout_s:.0f} s.")

    def _require_alive(self, rank: int) -> None:
        try:
            state = Path(f"/proc/{self._processes[rank]}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "gone"
        if state in ("gone", "Z", "X"):
            raise RuntimeError(
                f"The connection to rank {rank} is lost: its process {self._processes[rank]} has ended while rank {self._rank} "
                "waited for it. Look for the first error in that rank's output."
            )


class SharedMemoryCollectives(PairwiseCollectives):
    """Ranks of one machine on the CPU. What is too big for its memory, or not in it, goes by way of the base class."""

    def __init__(self, group: dist.ProcessGroup, board: Board) -> None:
        super().__init__(group)
        self._board = board
        self._outbox: list[Tensor] = []  # of each rank
        self._next = 0  # byte of the outbox that is written next
        self._exposed: deque[tuple[int, int, _Gather]] = deque()  # start, stop, by whom: oldest first
        self._blocks: list[tuple[int, int, list[Tensor]]] = []  # address, bytes, of each rank

    @staticmethod
    def open(group: dist.ProcessGroup) -> SharedMemoryCollectives | None:
        """The door, if all ranks of ``group`` are on one machine and may map each other's memory; collective."""
        here = (socket.gethostname(), platform.machine(), hasattr(os, "memfd_create"))
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (here, os.getpid()), group=group)
        # Other processors may show stores to each other in another order.
        if any(there != here for there, _ in everyone) or here[1] not in ("x86_64", "AMD64") or not here[2]:
            return None
        blocks = _share(group, _BOARD_BYTES)
        if blocks is None:
            return None
        words = [memoryview(block.numpy()).cast("q") for block in blocks]
        timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        return SharedMemoryCollectives(group, Board(words, dist.get_rank(group), [pid for _, pid in everyone], timeout))

    @property
    def nbytes(self) -> int:
        """See :meth:`LocalCollectives.nbytes`."""
        return super().nbytes + sum(block.nbytes for block in self._outbox[:1])

    def expect(self, shard_bytes: int) -> None:
        """See :meth:`LocalCollectives.expect`."""
        self._outbox = _share(self._group, shard_bytes + _SLACK) or []
        self._next, self._exposed = 0, deque()

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """See :meth:`LocalCollectives.allocate`."""
        blocks = _share(self._group, nbytes)
        if blocks is None:
            return super().allocate(nbytes, device)
        self._blocks.append((blocks[self.rank].data_ptr(), nbytes, blocks))
        return blocks[self.rank]

    def all_gather(self, buffer: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.all_gather`."""
        if not self._fits(buffer):
            return super().all_gather(buffer, label)
        return self._give(buffer, label)

    def _fits(self, buffer: Tensor) -> bool:
        return bool(self._outbox) and buffer.nbytes <= self.world_size * self._outbox[self.rank].numel()

    def _give(self, buffer: Tensor, label: int) -> _Gather:
        self.progress[1] += 1
        shards = buffer.view(torch.uint8).view(self.world_size, -1)
        nbytes = shards.shape[1]
        start = self._reserve(nbytes)
        self._outbox[self.rank][start : start + nbytes].copy_(shards[self.rank])
        number = self._board.post(label, start)
        gather = _Gather(buffer, self, shards, label, number)
        self._exposed.append((start, start + nbytes, gather))
        return gather

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.reduce_scatter`."""
        mine = self._parts_for_me(buffer)
        if mine is None:
            return super().reduce_scatter(buffer, label)
        self.progress[1] += 1
        return _Sum(mine, self, label, self._board.post(label))

    def all_to_all(self, sent: Tensor, arriving: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.all_to_all`."""
        mine = self._parts_for_me(sent)
        if mine is None:
            return super().all_to_all(sent, arriving, label)
        self.progress[1] += 1
        return _Swap(arriving, mine, self, label, self._board.post(label))

    def _parts_for_me(self, buffer: Tensor) -> list[Tensor] | None:
        """This rank's part [part] of each rank's buffer [world_size * part], if they lie in memory of :meth:`allocate`."""
        for address, nbytes, blocks in self._blocks:
            offset = buffer.data_ptr() - address
            if 0 <= offset < nbytes:
                everyone = [block[offset : offset + buffer.nbytes].view(buffer.dtype) for block in blocks]
                return [theirs.view(self.world_size, -1)[self.rank] for theirs in everyone]
        return None

    def agree(self, values: Tensor) -> Tensor:
        """See :meth:`LocalCollectives.agree`."""
        ballots = values.new_empty(self.world_size, values.numel())
        if not self._fits(ballots):
            return super().agree(values)
        ballots[self.rank] = values
        self._give(ballots, Meeting.AGREEMENT).wait()
        return torch.amax(ballots, 0, out=values)

    def _reserve(self, nbytes: int) -> int:
        """A place in the outbox that nobody reads any more."""
        if self._next + nbytes > self._outbox[self.rank].numel():
            self._next = 0
        start, self._next = self._next, self._next + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        while any(first < start + nbytes and start < last for first, last, _ in self._exposed):
            gather = self._exposed.popleft()[2]
            gather.read()  # every rank is here: if each reads before it waits, all are read
            self._board.wait_until_read(gather.number)
        return start

    def fetch(self, shards: Tensor, label: int, number: int) -> None:
        """Copy the other ranks' shards [world, bytes] of an exchange."""
        for r in self._others:
            theirs, start = self._board.posted(r, number)
            self.require_same_label(label, r, theirs)
            shards[r].copy_(self._outbox[r][start : start + shards.shape[1]])
        self._board.finish(number)

    def total(self, mine: list[Tensor], label: int, number: int) -> Tensor:
        """Add up what each rank has for this one [world][shard] in rank order."""
        for r in self._others:
            self.require_same_label(label, r, self._board.posted(r, number)[0])
        result = mine[self.rank]
        partial = mine[0]  # nobody else reads this part of rank 0's block: it may hold the partial sum
        for r in range(1, self.world_size):
            partial = torch.add(partial, mine[r], out=result if r >= self.rank else partial)
        self._board.finish(number)
        self._board.wait_until_read(number)  # hazard: overwriting gradients that other ranks still add up
        return result

    def collect(self, mine: list[Tensor], arriving: Tensor, label: int, number: int) -> None:
        """Copy what each rank has for this one [world][part]."""
        for r, target in enumerate(arriving.view(self.world_size, -1)):
            self.require_same_label(label, r, self._board.posted(r, number)[0])
            target.copy_(mine[r])
        self._board.finish(number)
        self._board.wait_until_read(number)  # hazard: overwriting what other ranks still copy

    def _exchange_label(self, label: int) -> Any:
        return _Label(self, label, self._board.post(label))

    def compare(self, label: int, number: int) -> None:
        """Raise if another rank comes to another exchange."""
        for r in self._others:
            self.require_same_label(label, r, self._board.posted(r, number)[0])
        self._board.finish(number)


class _Gather(Pending):
    def __init__(self, result: Tensor, door: SharedMemoryCollectives, shards: Tensor, label: int, number: int) -> None:
        super().__init__(result)
        self._door, self._label, self.number = door, label, number
        self._shards: Tensor | None = shards

    def read(self) -> None:
        """Copy what the other ranks give, once."""
        if self._shards is not None:
            self._door.fetch(self._shards, self._label, self.number)
            self._shards = None

    def wait(self) -> Tensor:
        """See :meth:`Pending.wait`."""
        self.read()
        result = self._result
        del self._result  # this object lives on until its place in the outbox is used again
        return result


class _Sum(Pending):
    def __init__(self, mine: list[Tensor], door: SharedMemoryCollectives, label: int, number: int) -> None:
        super().__init__(mine[door.rank])
        self._mine, self._door, self._label, self._number = mine, door, label, number

    def wait(self) -> Tensor:
        """See :meth:`Pending.wait`."""
        return self._door.total(self._mine, self._label, self._number)


class _Swap(Pending):
    def __init__(self, arriving: Tensor, mine: list[Tensor], door: SharedMemoryCollectives, label: int, number: int) -> None:
        super().__init__(arriving)
        self._mine, self._door, self._label, self._number = mine, door, label, number

    def wait(self) -> Tensor:
        """See :meth:`Pending.wait`."""
        self._door.collect(self._mine, self._result, self._label, self._number)
        return self._result


class _Label:
    def __init__(self, door: SharedMemoryCollectives, label: int, number: int) -> None:
        self._door, self._label, self._number = door, label, number

    def wait(self) -> None:
        """Until all ranks have come; raises if they came to something else."""
        self._door.compare(self._label, self._number)


def _share(group: dist.ProcessGroup, nbytes: int) -> list[Tensor] | None:
    """``nbytes`` [bytes] of memory of each rank, mapped by all; None on all ranks if one cannot map another's. Collective.

    The memory has no name and is gone with the last process that maps it, however that ends.
    """
    if not nbytes:
        return None
    world_size = dist.get_world_size(group)
    fd = os.memfd_create(f"lightning_zero3 rank {dist.get_rank(group)}")  # in /proc/<pid>/maps
    try:
        os.ftruncate(fd, nbytes + len(token := secrets.token_bytes(_ALIGNMENT)))
        os.pwrite(fd, token, nbytes)
        offers: list[Any] = [None] * world_size
        dist.all_gather_object(offers, (f"/proc/{os.getpid()}/fd/{fd}", token), group=group)
        blocks = [_map(path, nbytes, token) for path, token in offers]
        opened: list[Any] = [None] * world_size
        dist.all_gather_object(opened, all(block is not None for block in blocks), group=group)
    finally:
        os.close(fd)
    return [block for block in blocks if block is not None] if all(opened) else None


def _map(path: str, nbytes: int, token: bytes) -> Tensor | None:
    try:
        with open(path, "rb") as file:
            file.seek(nbytes)
            if file.read() != token:  # another machine's process may have the same number
                return None
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
