"""The communicator between ranks of one machine: memory that all of them map, in place of messages.

Unsharded buffers and the reduce buffer lie in such memory. A rank that has put its part there posts
the exchange in its flags; the others copy, or add, straight from there. Results are bitwise those
of :class:`~.process_group.ComparedCollectives`. ``wait()`` of an exchange also waits until every
other rank has read this rank's part: only then may the memory change.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange_log import Meeting
from .process_group import ComparedCollectives, Work
from .shared_flags import FLAGS_BYTES, SharedFlags

_BALLOT_BYTES = 1 << 16  # memory of each rank for agreements


class SharedMemoryCollectives(ComparedCollectives):
    """Collectives between ranks of one machine on the CPU.

    Tensors outside the memory of :meth:`allocate` travel by way of the base class.
    """

    def __init__(self, group: dist.ProcessGroup, flags: SharedFlags, ballots: list[Tensor]) -> None:
        super().__init__(group)
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.flags = flags
        self.unread: list[_Exchange] = []  # exchanges of which this rank has to read
        flags.on_wait, flags.require_same_label = self._read, self.require_same_label
        flags.describe = lambda label: self.exchange_log.describe(label)
        # address, bytes, the block of each rank
        self._blocks: list[tuple[int, int, list[Tensor]]] = []
        self._ballots = ballots  # of each rank [int64]

    @staticmethod
    def open(group: dist.ProcessGroup) -> SharedMemoryCollectives | None:
        """Make the communicator if the ranks of ``group`` can map each other's memory, else None.

        They must be on one machine, on Linux and x86-64. Collective.
        """
        here = (socket.gethostname(), platform.machine(), hasattr(os, "memfd_create"))
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (here, os.getpid()), group=group)
        # Only on x86 do processors see each other's stores in the order of the program, as
        # `SharedFlags.post` needs.
        if (
            any(there != here for there, _ in everyone)
            or here[1] not in ("x86_64", "AMD64")
            or not here[2]
        ):
            return None
        blocks = _share_memory(group, FLAGS_BYTES + _BALLOT_BYTES)
        if blocks is None:
            return None
        words = [block[:FLAGS_BYTES].numpy().data.cast("q") for block in blocks]
        ballots = [block[FLAGS_BYTES:].view(torch.int64) for block in blocks]
        timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        flags = SharedFlags(words, dist.get_rank(group), [pid for _, pid in everyone], timeout)
        return SharedMemoryCollectives(group, flags, ballots)

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """See :meth:`LocalCollectives.allocate`."""
        blocks = _share_memory(self._group, nbytes)
        if blocks is None:
            return super().allocate(nbytes, device)
        self._blocks.append((blocks[self.rank].data_ptr(), nbytes, blocks))
        return blocks[self.rank]

    def _find_buffers(self, buffer: Tensor) -> list[Tensor] | None:
        """Return each rank's memory [world_size, shard] at the place of ``buffer``.

        None if ``buffer`` is not in shared memory.
        """
        for address, nbytes, blocks in self._blocks:
            offset = buffer.data_ptr() - address
            if 0 <= offset < nbytes:
                end = offset + buffer.nbytes
                return [
                    block[offset:end].view(buffer.dtype).view(self.world_size, -1)
                    for block in blocks
                ]
        return None

    def _read(self) -> None:
        """Read what has been posted; another rank may wait for that while this one waits."""
        for exchange in tuple(self.unread):
            exchange.read()

    def all_gather(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_gather`."""
        buffers = self._find_buffers(buffer)
        if buffers is None:
            return super().all_gather(buffer, label)

        def read() -> None:
            for rank in self.others:
                buffers[self.rank][rank].copy_(buffers[rank][rank])

        gather = _Exchange(self, label, buffer, read)
        gather.read()  # the last rank to come need not wait for the others then
        return gather

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.reduce_scatter`."""
        buffers = self._find_buffers(buffer)
        if buffers is None:
            return super().reduce_scatter(buffer, label)
        total = buffers[self.rank][self.rank]

        def read() -> None:
            # No other rank reads this part of rank 0's block, so it may hold the partial sum. From
            # this rank's own part on, which the sum has then read, the sum lies there.
            partial = buffers[0][self.rank]
            for rank in range(1, self.world_size):
                target = total if rank >= self.rank else partial
                partial = torch.add(partial, buffers[rank][self.rank], out=target)

        return _Exchange(self, label, total, read)

    def all_to_all(self, sent: Tensor, arriving: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_to_all`."""
        buffers = self._find_buffers(sent)
        if buffers is None:
            return super().all_to_all(sent, arriving, label)

        def read() -> None:
            for rank, target in enumerate(arriving.view(self.world_size, -1)):
                target.copy_(buffers[rank][self.rank])

        return _Exchange(self, label, arriving, read)

    def agree(self, values: Tensor, meeting: Meeting = Meeting.AGREEMENT) -> Tensor:
        """See :meth:`LocalCollectives.agree`."""
        if values.nbytes > _BALLOT_BYTES:
            return super().agree(values, meeting)
        count = values.numel()
        self._ballots[self.rank][:count] = values

        def read() -> None:
            for rank in self.others:
                torch.maximum(values, self._ballots[rank][:count], out=values)

        return _Exchange(self, meeting, values, read).wait()

    def _require_same_labels(self, label: int) -> None:
        _Exchange(self, label, self._ballots[0], lambda: None).wait()


class _Exchange:
    """An exchange that this rank has posted, in which ranks read from each other's memory.

    This rank reads the parts of all ranks at once, when all have posted.

    Args:
        label: the label to post.
        result: the return value of :meth:`wait`.
        read_parts: computes the result from memory of all ranks.
    """

    def __init__(
        self,
        communicator: SharedMemoryCollectives,
        label: int,
        result: Tensor,
        read_parts: Callable[[], None],
    ) -> None:
        self._result, self._read_parts = result, read_parts
        self._communicator, self._label = communicator, label
        communicator.exchange_log.progress[1] += 1
        self._number = communicator.flags.post(label)
        communicator.unread.append(self)

    def read(self) -> None:
        """Read the parts if all ranks have posted by now."""
        communicator = self._communicator
        for rank in communicator.others:
            if not communicator.flags.is_posted(rank, self._number, self._label):
                return
        self._read_parts()
        communicator.unread.remove(self)
        communicator.flags.finish(self._number)

    def wait(self) -> Tensor:
        """See :meth:`Work.wait`; raise if a rank has posted another label."""
        communicator = self._communicator
        if self in communicator.unread:
            for rank in communicator.others:
                label = communicator.flags.wait_for_post(rank, self._number)
                communicator.require_same_label(self._label, rank, label)
        if self in communicator.unread:  # it may have been read while this rank waited
            self.read()
        # hazard: the caller overwrites memory that other ranks still read
        communicator.flags.wait_until_read(self._number)
        return self._result


def _share_memory(group: dist.ProcessGroup, nbytes: int) -> list[Tensor] | None:
    """Return a block [nbytes, uint8] of each rank, in rank order, mapped by all ranks.

    None on all ranks if one cannot map another's block, or if ``nbytes`` is 0. The memory has no
    name in a file system and is gone with the last process that maps it, however that process ends.
    Collective.
    """
    if not nbytes:
        return None
    world_size = dist.get_world_size(group)
    # The name shows in /proc/<pid>/maps.
    fd = os.memfd_create(f"lightning_zero3 rank {dist.get_rank(group)}")
    try:
        token = secrets.token_bytes(64)
        os.ftruncate(fd, nbytes + len(token))
        os.pwrite(fd, token, nbytes)
        offers: list[Any] = [None] * world_size
        dist.all_gather_object(offers, (f"/proc/{os.getpid()}/fd/{fd}", token), group=group)
        blocks = [_map_block(path, nbytes, token) for path, token in offers]
        are_mapped: list[Any] = [None] * world_size
        # hazard: the descriptor must stay open until every rank has mapped the block through it
        dist.all_gather_object(are_mapped, all(block is not None for block in blocks), group=group)
    finally:
        os.close(fd)
    return [block for block in blocks if block is not None] if all(are_mapped) else None


def _map_block(path: str, nbytes: int, token: bytes) -> Tensor | None:
    """Map ``nbytes`` of the file ``path``; None if this process cannot, or the file is another."""
    try:
        with open(path, "rb") as file:
            file.seek(nbytes)
            # On a machine with the same host name another process may have the same id.
            if file.read() != token:
                return None
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None
