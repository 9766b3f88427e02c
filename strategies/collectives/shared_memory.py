"""The communicator between ranks of one machine: memory that all of them map, in place of messages.

Slots and the reduce buffer lie in such memory. A rank that has put its part there posts the
exchange on its flags; the others copy, or add, straight from there. Results are bitwise those of
:class:`~.pairwise.PairwiseCollectives`. Waiting for an exchange also waits until every other rank
has read what this one gave: only then may the memory change.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange_log import Meeting
from .pairwise import PairwiseCollectives
from .process_group import Pending, Work
from .shared_flags import FLAGS_BYTES, SharedFlags

_BALLOT_BYTES = 1 << 16  # for agreements


class SharedMemoryCollectives(PairwiseCollectives):
    """Ranks of one machine on the CPU. What is not in memory of :meth:`allocate` goes by way of the
    base class.
    """

    def __init__(self, group: dist.ProcessGroup, flags: SharedFlags, ballots: list[Tensor]) -> None:
        super().__init__(group)
        self.flags, self.others = flags, self._others
        self.unread: list[_Gather | _Taking] = []
        flags.meanwhile, flags.require_same_label = self._read, self.require_same_label
        self._blocks: list[
            tuple[int, int, list[Tensor]]
        ] = []  # address, bytes, the block of each rank
        self._ballots = [block.view(torch.int64) for block in ballots]  # of each rank

    @staticmethod
    def open(group: dist.ProcessGroup) -> SharedMemoryCollectives | None:
        """The communicator, if all ranks of ``group`` are on one machine and may map each other's
        memory; collective.
        """
        here = (socket.gethostname(), platform.machine(), hasattr(os, "memfd_create"))
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (here, os.getpid()), group=group)
        # Other processors may show stores to each other in another order.
        if (
            any(there != here for there, _ in everyone)
            or here[1] not in ("x86_64", "AMD64")
            or not here[2]
        ):
            return None
        blocks, ballots = _share(group, FLAGS_BYTES), _share(group, _BALLOT_BYTES)
        if blocks is None or ballots is None:
            return None
        words = [memoryview(block.numpy()).cast("q") for block in blocks]
        timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        flags = SharedFlags(words, dist.get_rank(group), [pid for _, pid in everyone], timeout)
        return SharedMemoryCollectives(group, flags, ballots)

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """See :meth:`LocalCollectives.allocate`."""
        blocks = _share(self._group, nbytes)
        if blocks is None:
            return super().allocate(nbytes, device)
        self._blocks.append((blocks[self.rank].data_ptr(), nbytes, blocks))
        return blocks[self.rank]

    def _everyones(self, buffer: Tensor) -> list[Tensor] | None:
        """What each rank has in the place of ``buffer``, as [world_size, shard]; None if that is
        not shared memory.
        """
        for address, nbytes, blocks in self._blocks:
            offset = buffer.data_ptr() - address
            if 0 <= offset < nbytes:
                same = [
                    block[offset : offset + buffer.nbytes].view(buffer.dtype) for block in blocks
                ]
                return [there.view(self.world_size, -1) for there in same]
        return None

    def _read(self) -> None:
        """Another rank may wait for that, whatever this one waits for."""
        for exchange in tuple(self.unread):
            exchange.read()

    def all_gather(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_gather`."""
        everyones = self._everyones(buffer)
        if everyones is None:
            return super().all_gather(buffer, label)
        self.exchange_log.progress[1] += 1
        return _Gather(self, label, buffer, everyones)

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.reduce_scatter`."""
        everyones = self._everyones(buffer)
        if everyones is None:
            return super().reduce_scatter(buffer, label)
        self.exchange_log.progress[1] += 1
        mine = [shards[self.rank] for shards in everyones]
        return _Sum(self, label, mine[self.rank], mine)

    def all_to_all(self, sent: Tensor, arriving: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_to_all`."""
        everyones = self._everyones(sent)
        if everyones is None:
            return super().all_to_all(sent, arriving, label)
        self.exchange_log.progress[1] += 1
        return _Swap(self, label, arriving, [parts[self.rank] for parts in everyones])

    def agree(self, values: Tensor, meeting: Meeting = Meeting.AGREEMENT) -> Tensor:
        """See :meth:`LocalCollectives.agree`."""
        if values.nbytes > _BALLOT_BYTES:
            return super().agree(values, meeting)
        self.exchange_log.progress[1] += 1
        self._ballots[self.rank][: values.numel()] = values
        return _Maximum(self, meeting, values, self._ballots).wait()

    def _exchange_label(self, label: int) -> Any:
        return _Label(self, label, self._ballots[0], [])  # what it results in is not looked at


class _Exchange(Pending):
    """One line of the flags, from this rank's post on, in which ranks read what others have.

    Args:
        result: of :meth:`wait`.
        parts: what each rank has, in rank order.
    """

    def __init__(
        self, communicator: SharedMemoryCollectives, label: int, result: Tensor, parts: list[Tensor]
    ) -> None:
        super().__init__(result)
        self._communicator, self._label, self._parts = communicator, label, parts
        self._number = communicator.flags.post(label)

    def _expect(self, rank: int) -> None:
        """Wait until ``rank`` has come; raise if it came to something else."""
        self._communicator.require_same_label(
            self._label, rank, self._communicator.flags.posted(rank, self._number)
        )

    def _leave(self) -> None:
        """This rank has read all it needs; wait until the others have."""
        self._communicator.flags.finish(self._number)
        self._communicator.flags.wait_until_read(self._number)


class _Label(_Exchange):
    """Nothing but the comparison."""

    def wait(self) -> Tensor:
        """Until all ranks have come."""
        for rank in self._communicator.others:
            self._expect(rank)
        return self._result


class _Gather(_Exchange):
    """Copies shards; of ranks that have come already at once, so that whoever comes last finds that
    the others have read.
    """

    def __init__(
        self, communicator: SharedMemoryCollectives, label: int, result: Tensor, parts: list[Tensor]
    ) -> None:
        super().__init__(communicator, label, result, parts)
        self._unread = list(communicator.others)
        communicator.unread.append(self)
        self.read()

    def read(self) -> None:
        """Copy what has been posted by now."""
        for rank in tuple(self._unread):
            if self._communicator.flags.is_posted(rank, self._number, self._label):
                self._parts[self._communicator.rank][rank].copy_(self._parts[rank][rank])
                self._unread.remove(rank)
        if not self._unread:
            self._communicator.flags.finish(self._number)
            self._communicator.unread.remove(self)

    def wait(self) -> Tensor:
        """See :meth:`Work.wait`."""
        for rank in tuple(self._unread):
            self._expect(rank)
        if self._unread:
            self.read()
        self._leave()  # hazard: a module may write to its weights, and another unit takes the slot
        return self._result


class _Taking(_Exchange):
    """Takes what all have at once, when all have come."""

    def __init__(
        self, communicator: SharedMemoryCollectives, label: int, result: Tensor, parts: list[Tensor]
    ) -> None:
        super().__init__(communicator, label, result, parts)
        communicator.unread.append(self)

    def take(self) -> None:
        """Read what the others have."""
        raise NotImplementedError

    def read(self) -> None:
        """Take, if all have come by now."""
        if all(
            self._communicator.flags.is_posted(rank, self._number, self._label)
            for rank in self._communicator.others
        ):
            self.take()
            self._communicator.unread.remove(self)
            self._communicator.flags.finish(self._number)

    def wait(self) -> Tensor:
        """See :meth:`Work.wait`."""
        communicator = self._communicator
        for rank in communicator.others:
            self._expect(rank)
        if self in communicator.unread:
            self.read()
        # hazard: overwriting what other ranks still read
        communicator.flags.wait_until_read(self._number)
        return self._result


class _Sum(_Taking):
    """Adds up in rank order."""

    def take(self) -> None:
        """See :meth:`_Taking.take`."""
        # nobody else reads this part of rank 0's block: it may hold the partial sum
        partial = self._parts[0]
        for rank in range(1, len(self._parts)):
            partial = torch.add(
                partial,
                self._parts[rank],
                out=self._result if rank >= self._communicator.rank else partial,
            )


class _Swap(_Taking):
    """Copies this rank's part of each."""

    def take(self) -> None:
        """See :meth:`_Taking.take`."""
        for part, target in zip(self._parts, self._result.view(len(self._parts), -1), strict=True):
            target.copy_(part)


class _Maximum(_Exchange):
    """Of votes, element by element."""

    def wait(self) -> Tensor:
        """See :meth:`Work.wait`."""
        for rank in self._communicator.others:
            self._expect(rank)
            torch.maximum(self._result, self._parts[rank][: self._result.numel()], out=self._result)
        self._leave()  # hazard: the next vote
        return self._result


def _share(group: dist.ProcessGroup, nbytes: int) -> list[Tensor] | None:
    """``nbytes`` [bytes] of memory of each rank, mapped by all; None on all ranks if one cannot map
    another's. Collective.

    The memory has no name and is gone with the last process that maps it, however that ends.
    """
    if not nbytes:
        return None
    world_size = dist.get_world_size(group)
    fd = os.memfd_create(f"lightning_zero3 rank {dist.get_rank(group)}")  # in /proc/<pid>/maps
    try:
        os.ftruncate(fd, nbytes + len(token := secrets.token_bytes(64)))
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
