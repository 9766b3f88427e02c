"""The communicator between ranks of one machine: memory that all of them map, in place of messages.

Unsharded buffers and the reduce buffer lie in such memory. A rank that has put its part there posts
the exchange in its flags; the others copy, or add, straight from there. Results are bitwise those
of :class:`~..collectives.ComparedCollectives`. ``wait()`` of an exchange also waits until every
other rank has read this rank's part: only then may the memory change.
"""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import ComparedCollectives, Meeting, Work

_RING = 512  # exchanges whose flags are kept; far fewer are ever in flight
# Flags of one rank, words of 8 bytes: the number of its last exchange; by exchange modulo _RING the
# label; by the same the number of the exchange that it has finished.
_POSTED, _LABELS, _FINISHED = 0, 1, 1 + _RING
# behind its flags, the values that it comes to an agreement with
_VOTES, _MOST_VOTES = 1 + 2 * _RING, 4096
_SPINS = 100  # reads of a word before the first sleep
_LIVENESS_CHECK_S = 0.1  # between two checks that the other process lives


class SharedMemoryCollectives(ComparedCollectives):
    """Collectives between ranks of one machine on the CPU.

    Agreements go by it, and all-gathers and reduce-scatters in the memory of :meth:`allocate`; the
    rest by way of the base class. A rank writes its own flags and votes, and reads all.
    """

    def __init__(
        self, group: dist.ProcessGroup, blocks: list[Tensor], processes: list[int]
    ) -> None:
        """``blocks`` hold each rank's flags, ``processes`` are the process ids, in rank order."""
        super().__init__(group)
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.words = [block.numpy().data.cast("q") for block in blocks]
        self._votes = [block.view(torch.int64)[_VOTES:] for block in blocks]
        self._processes = processes
        options = group._get_backend(torch.device("cpu")).options
        self._timeout_s = options._timeout.total_seconds()
        self.unread: list[_Exchange] = []  # exchanges of which this rank has to read
        # address, bytes, the block of each rank
        self._blocks: list[tuple[int, int, list[Tensor]]] = []

    @staticmethod
    def open(group: dist.ProcessGroup) -> SharedMemoryCollectives | None:
        """Make the communicator if the ranks of ``group`` can map each other's memory, else None.

        They must be on one machine, on Linux and x86-64. Collective.
        """
        # Only on x86 do processors see each other's stores in the order of the program, as
        # :class:`_Exchange` needs.
        able = hasattr(os, "memfd_create") and platform.machine() in ("x86_64", "AMD64")
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, able and os.getpid(), group=group)
        blocks = _share_memory(group, 8 * (_VOTES + _MOST_VOTES)) if all(everyone) else None
        return SharedMemoryCollectives(group, blocks, everyone) if blocks else None

    def wait_for(self, rank: int, word: int, value: int) -> None:
        """Wait until ``word`` of ``rank`` is at least ``value``.

        Raises:
            RuntimeError: the process of ``rank`` has ended, or the wait timed out.
            DivergenceError: ``rank`` has posted another label in one of the recent exchanges.
        """
        words = self.words[rank]
        if words[word] >= value:
            return
        for _ in range(_SPINS):
            os.sched_yield()
            if words[word] >= value:
                return
        begin = last_check = time.monotonic()
        pause = 2e-5
        while words[word] < value:
            # hazard: the other rank may itself wait until this one has read an earlier exchange
            for exchange in tuple(self.unread):
                exchange.read()
            time.sleep(pause)
            pause = min(1.5 * pause, 1e-3)
            now = time.monotonic()
            if now - last_check > _LIVENESS_CHECK_S:
                last_check = now
                self._require_alive(rank)
                self._compare_recent_labels(rank)
            if now - begin > self._timeout_s:
                raise RuntimeError(
                    f"Rank {self.rank} timed out: rank {rank} did not come in"
                    f" {self._timeout_s:.0f} s."
                )

    def _compare_recent_labels(self, rank: int) -> None:
        """Compare labels of all recent exchanges that this rank and ``rank`` have both posted.

        A difference may lie in a later exchange than the one that this rank waits for; ``rank`` may
        have raised there, and does not come back.
        """
        mine, words = self.words[self.rank], self.words[rank]
        last = min(mine[_POSTED], words[_POSTED])
        for number in range(max(1, last - _RING // 2), last + 1):
            word = _LABELS + number % _RING
            self.require_same_label(mine[word], rank, words[word])

    def _require_alive(self, rank: int) -> None:
        process = self._processes[rank]
        try:
            text = Path(f"/proc/{process}/stat").read_text()
            state = text.rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "gone"
        if state in ("gone", "Z", "X"):  # zombie, dead
            mine = self.words[self.rank]
            doing = self.exchange_log.describe(mine[_LABELS + mine[_POSTED] % _RING])
            raise RuntimeError(
                f"The connection to rank {rank} is lost: its process {process} has ended while rank"
                f" {self.rank} waited for it to {doing}.\nIts output may say why. If it came to"
                f" its end, rank {self.rank} did alone what all ranks do together: forwards, reads"
                " of weights, saves and `gathered`, also after `fit`."
            )

    # ---------------------------------------------------------------------------------- exchanges

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

    def agree(self, values: Tensor, meeting: Meeting = Meeting.AGREEMENT) -> Tensor:
        """See :meth:`LocalCollectives.agree`."""
        if values.numel() > _MOST_VOTES:
            return super().agree(values, meeting)
        votes = [block[: values.numel()] for block in self._votes]
        votes[self.rank].copy_(values)

        def read() -> None:
            for rank in self.others:
                torch.maximum(values, votes[rank], out=values)

        _Exchange(self, meeting, None, read).wait()
        return values

    def _require_same_labels(self, label: int) -> None:
        _Exchange(self, label, None, lambda: None).wait()


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
        result: Tensor | None,
        read_parts: Callable[[], None],
    ) -> None:
        self._result, self._read_parts = result, read_parts
        self._communicator, self._label = communicator, label
        communicator.exchange_log.progress[1] += 1
        self._mine = communicator.words[communicator.rank]
        self._number = self._mine[_POSTED] + 1
        self._place = self._number % _RING
        self._mine[_LABELS + self._place] = label
        # hazard: a rank that reads the number reads the label next. On x86 other processors see
        # stores in the order of the program, so the number is written last.
        self._mine[_POSTED] = self._number
        communicator.unread.append(self)

    def read(self) -> None:
        """Read the parts if all ranks have posted by now, with this label."""
        for words in self._communicator.words:
            if words[_POSTED] < self._number or words[_LABELS + self._place] != self._label:
                return
        self._read_parts()
        self._communicator.unread.remove(self)
        self._mine[_FINISHED + self._place] = self._number

    def wait(self) -> Any:
        """See :meth:`Work.wait`; raise if a rank has posted another label."""
        communicator = self._communicator
        if self in communicator.unread:
            for rank in communicator.others:
                communicator.wait_for(rank, _POSTED, self._number)
                label = communicator.words[rank][_LABELS + self._place]
                communicator.require_same_label(self._label, rank, label)
        if self in communicator.unread:  # it may have been read while this rank waited
            self.read()
        # hazard: the caller overwrites memory that other ranks still read
        for rank in communicator.others:
            communicator.wait_for(rank, _FINISHED + self._place, self._number)
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
