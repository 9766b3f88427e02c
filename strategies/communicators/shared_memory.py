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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import ComparedCollectives, GroupCollectives, Meeting, Work

_RING = 512  # exchanges whose labels are kept; far fewer are ever in flight
# Flags of one rank, words of 8 bytes: its process; the numbers of the last exchanges that it has
# posted, and read; by exchange modulo _RING the label.
_PROCESS, _POSTED, _READ, _LABELS = range(4)
# behind its flags, the values that it comes to an agreement with
_VOTES, _MOST_VOTES = _LABELS + _RING, 4096
# A wait looks at the flags all the time at first, then in pauses; at last whether processes live.
_NO_PAUSE_S, _LIVENESS_S = 1e-4, 1.0


class SharedMemoryCollectives(ComparedCollectives):
    """Collectives between ranks of one machine on the CPU.

    Agreements go by it, and all-gathers and reduce-scatters in the memory of :meth:`allocate`; the
    rest by way of the base class. A rank writes its own flags, and reads all.
    """

    def __init__(self, group: dist.ProcessGroup, blocks: list[Tensor]) -> None:
        """``blocks`` hold each rank's flags, in rank order."""
        super().__init__(group)
        self._others = [rank for rank in range(self.world_size) if rank != self.rank]
        self._words = [block.numpy().data.cast("q") for block in blocks]
        self._mine = self._words[self.rank]
        self._mine[_PROCESS] = os.getpid()
        options = group._get_backend(torch.device("cpu")).options
        self._timeout_s = options._timeout.total_seconds()
        # reads the others' parts of each exchange that this rank has posted, and not read
        self._unread: deque[Callable[[], None]] = deque()
        # address, bytes, the block of each rank
        self._blocks: list[tuple[int, int, list[Tensor]]] = []
        self._votes = [block.view(torch.int64)[_VOTES:] for block in blocks]

    @staticmethod
    def open(group: dist.ProcessGroup) -> SharedMemoryCollectives | None:
        """Make the communicator if the ranks of ``group`` can map each other's memory, else None.

        They must be on one machine, on Linux and x86-64. Collective.
        """
        # Only on x86 do processors see each other's stores in the order of the program, as
        # :meth:`_post` needs.
        if not hasattr(os, "memfd_create") or platform.machine() != "x86_64":
            return None
        blocks = _share_memory(group, 8 * (_VOTES + _MOST_VOTES))
        return SharedMemoryCollectives(group, blocks) if blocks else None

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
            for rank in self._others:
                buffers[self.rank][rank].copy_(buffers[rank][rank])

        gather = self._post(label, read)
        self._read()  # the last rank to come need not wait for the others then
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

        return self._post(label, read, total)

    def agree(self, values: Tensor, meeting: Meeting = Meeting.AGREEMENT) -> Tensor:
        """See :meth:`LocalCollectives.agree`."""
        if values.numel() > _MOST_VOTES:
            return super().agree(values, meeting)
        votes = [block[: values.numel()] for block in self._votes]
        votes[self.rank].copy_(values)

        def read() -> None:
            for rank in self._others:
                torch.maximum(values, votes[rank], out=values)

        self._post(meeting, read).wait()
        return values

    def _require_same_labels(self, label: int) -> None:
        self._post(label, lambda: None).wait()

    # ----------------------------------------------------------------------------------- the flags

    def _post(self, label: int, read: Callable[[], None], result: Any = None) -> _Exchange:
        """Begin an exchange: ``read`` makes the ``result`` of what lies in all ranks' memory."""
        self.exchange_log.progress[1] += 1
        number = self._mine[_POSTED] + 1
        self._mine[_LABELS + number % _RING] = label
        # hazard: a rank that reads the number reads the label next. On x86 other processors see
        # stores in the order of the program, so the number is written last.
        self._mine[_POSTED] = number
        self._unread.append(read)
        return _Exchange(self, number, result)

    def _late(self, word: int, number: int) -> list[int]:
        """The other ranks that have not come to this exchange."""
        return [rank for rank in self._others if self._words[rank][word] < number]

    def _read(self) -> None:
        """Read, one after another, the exchanges that all ranks have posted.

        Raises:
            DivergenceError: a rank has posted another label.
        """
        while self._unread:
            number = self._mine[_READ] + 1
            place, late = _LABELS + number % _RING, self._late(_POSTED, number)
            for rank in self._others:
                if rank not in late:
                    self.require_same_label(self._mine[place], rank, self._words[rank][place])
            if late:
                return
            self._unread[0]()  # if a signal's handler raises in it, it is read again
            self._mine[_READ] = number
            self._unread.popleft()

    def wait_until_read(self, number: int) -> None:
        """Wait until all ranks have read the exchange with this number.

        Raises:
            RuntimeError: the process of another rank has ended, or the wait timed out.
            DivergenceError: see :meth:`_read`.
        """
        begin = time.monotonic()
        while True:
            # hazard: other ranks may themselves wait until this one has read an earlier exchange
            self._read()
            late = self._late(_READ, number)
            if not late and self._mine[_READ] >= number:
                return
            waited = time.monotonic() - begin
            if waited < _NO_PAUSE_S:
                os.sched_yield()
            else:
                time.sleep(min(waited / 100, 0.01))
            for rank in late if waited > _LIVENESS_S else ():
                self._require_alive(rank)
                if waited > self._timeout_s:
                    raise RuntimeError(
                        f"Rank {self.rank} timed out: rank {rank} did not come in"
                        f" {self._timeout_s:.0f} s."
                    )

    def _require_alive(self, rank: int) -> None:
        process = self._words[rank][_PROCESS]
        if not process:
            return  # it has not come so far
        with suppress(OSError):
            stat = Path(f"/proc/{process}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] not in ("Z", "X"):  # zombie, dead
                return
        doing = self.exchange_log.describe(self._mine[_LABELS + self._mine[_POSTED] % _RING])
        raise RuntimeError(
            f"The connection to rank {rank} is lost: its process {process} has ended while rank"
            f" {self.rank} waited for it to {doing}.\nIts output may say why. If it came to"
            f" its end, rank {self.rank} did alone what all ranks do together: forwards, reads"
            " of weights, saves and `gathered`, also after `fit`."
        )


@dataclass
class _Exchange:
    """An exchange that this rank has posted, in which ranks read from each other's memory."""

    communicator: SharedMemoryCollectives
    number: int
    result: Any

    def wait(self) -> Any:
        """See :meth:`Work.wait`; raise if a rank has posted another label."""
        # hazard: the caller overwrites memory that other ranks still read
        self.communicator.wait_until_read(self.number)
        return self.result


def _share_memory(group: dist.ProcessGroup, nbytes: int) -> list[Tensor] | None:
    """Return a block [nbytes, uint8] of each rank, in rank order, mapped by all ranks.

    None on all ranks if one cannot map another's block, or if ``nbytes`` is 0. The memory has no
    name in a file system and is gone with the last process that maps it, however that process ends.
    Collective.
    """
    if not nbytes:
        return None
    gather = GroupCollectives(group).all_gather_object
    # It shows in /proc/<pid>/maps, and no other block has it.
    name = f"lightning_zero3 rank {dist.get_rank(group)} {secrets.token_hex(16)}"
    fd = os.memfd_create(name)
    try:
        os.ftruncate(fd, nbytes)
        offers = gather((f"/proc/{os.getpid()}/fd/{fd}", name))
        blocks = [_map_block(path, name, nbytes) for path, name in offers]
        # hazard: the descriptor must stay open until every rank has mapped the block through it
        are_mapped = gather(all(block is not None for block in blocks))
    finally:
        os.close(fd)
    return blocks if all(are_mapped) else None


def _map_block(path: str, name: str, nbytes: int) -> Any:
    """Map ``nbytes`` of the file ``path``; None if this process cannot, or the file is another."""
    with suppress(OSError, RuntimeError):
        # On a machine with the same host name another process may have the same id.
        if name in os.readlink(path):
            return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    return None
