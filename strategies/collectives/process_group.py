"""Communicators: every byte that the engine exchanges goes through one of these objects.

Tests substitute the object to count, delay or break a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from .exchange_log import LOOK_FOR, DivergenceError, ExchangeLog, Meeting
from .rounding import narrow

# The process group's own methods, whose names changed in torch 2.13. The functions of
# torch.distributed around them would add seven Python calls to each collective.
_all_gather = (
    getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
)
_reduce_scatter = (
    getattr(dist.ProcessGroup, "reduce_scatter_single", None)
    or dist.ProcessGroup._reduce_scatter_base
)

_GATHER_OPTIONS, _REDUCE_OPTIONS = AllgatherOptions(), ReduceScatterOptions()  # default: a sum
_GATHER_OPTIONS.asyncOp = _REDUCE_OPTIONS.asyncOp = False  # run on the current stream


class Work(Protocol):
    """A collective in flight: a class of this package, or ``torch.distributed.Work``."""

    def wait(self) -> Any:
        """Block the host (CPU) or the current stream (CUDA) until the end; return the result.

        To be called once.
        """


class Pending(tuple[Tensor, Sequence[Work]]):
    """A collective whose result has its memory from the start, and the works that it waits for.

    It is a tuple, which each reduction can make without a Python call.
    """

    __slots__ = ()

    def wait(self) -> Tensor:
        """See :meth:`Work.wait`."""
        for work in self[1]:
            work.wait()
        return self[0]


_FINISHED = Pending((torch.empty(0, device="cpu"), ()))


class LocalCollectives:
    """The communicator of a single rank: all data is already where it belongs.

    Attributes:
        rank: this rank's number among those that share the model's shards.
        world_size: the number of ranks that share the model's shards.
        global_rank: this rank's number among all ranks.
        replicas: the number of groups that each share the model's shards.
        alone: whether there is no other rank to exchange with, and nothing to shard.
        exchange_log: the log of the exchanges.
    """

    alone = True
    rank = 0
    world_size = 1
    global_rank = 0
    replicas = 1

    def __init__(self, alone: bool = True) -> None:
        if not alone:  # shards live elsewhere than what is unsharded
            self.alone = False
        self.exchange_log = ExchangeLog()

    def meet(self, label: int) -> None:
        """Compare ``label`` with the other ranks, now or at the next agreement.

        Raises:
            DivergenceError: a rank comes with another label, and the communicator compares now.
        """

    def all_gather(self, buffer: Tensor, label: int = 0) -> Work:
        """Gather ``buffer`` [world_size * shard] in place.

        Rank r has put its shard at ``[r * shard, (r + 1) * shard)``. The return value of ``wait()``
        means nothing.
        """
        return _FINISHED

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Work:
        """Sum ``buffer`` [world_size * shard] over ranks; ``wait()`` returns this rank's [shard].

        The result may be part of ``buffer``, which is overwritten.
        """
        return Pending((buffer, ()))

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Return memory [nbytes, uint8] in which all-gathers and reduce-scatters are fastest.

        Collective.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def all_to_all(self, sent: Tensor, arriving: Tensor, label: int = 0) -> Work:
        """Send part r of ``sent`` [world_size * part] to each rank r.

        The part that rank r sends here arrives in part r of ``arriving`` [world_size * part].
        """
        return Pending((arriving.copy_(sent), ()))

    def reduce_scatter_in(
        self, dtype: torch.dtype, buffer: Tensor, room: Tensor, label: int = 0
    ) -> Work:
        """Reduce-scatter an fp32 ``buffer``, whose summands travel rounded to ``dtype``.

        See :meth:`reduce_scatter`; ``room`` is as in :func:`narrow`. The shard of every rank is
        rounded, also this rank's own, so that a sum does not depend on the rank that computes it.
        """
        arriving = buffer.view(dtype)[buffer.numel() :]
        exchange = self.all_to_all(narrow(buffer, dtype, room), arriving, label)
        # The result overwrites the first rounded values, which have been sent when it is computed.
        return _RankedSum(buffer[: buffer.numel() // self.world_size], exchange)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce ``tensor`` over ranks in place ("sum", "max", "min")."""
        return tensor

    def agree(self, values: Tensor, meeting: Meeting = Meeting.AGREEMENT) -> Tensor:
        """Take the elementwise maximum of ``values`` [any length, int64, CPU] over ranks in place.

        It runs on the host and never waits for a device.
        """
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy contiguous ``tensor`` of rank ``source`` to all ranks in place."""
        return tensor

    def all_gather_object(self, value: object) -> list[Any]:
        """Return ``value`` of every rank, in rank order."""
        return [value]


class _RankedSum:
    """A reduce-scatter into ``result`` [shard], made of an all-to-all.

    It sums in rank order when all summands have arrived, independent of timing.

    Args:
        exchange: brings the summands [world_size * shard], in the dtype that they travel in.
    """

    def __init__(self, result: Tensor, exchange: Work) -> None:
        self._result, self._exchange = result, exchange

    def wait(self) -> Tensor:
        """See :meth:`Work.wait`."""
        total, *others = self._exchange.wait().view(-1, self._result.numel())
        if total.dtype != self._result.dtype:
            total = self._result.copy_(total)
        for summand in others:
            total = torch.add(total, summand, out=self._result)
        return total


class GroupCollectives(LocalCollectives):
    """Collectives of a process group (NCCL, or the base of those over gloo).

    A group of one rank runs real exchanges too.

    Args:
        group: the ranks that share the model's shards.
        control: the same ranks in a group for agreements on the host; ``group`` by default.
    """

    alone = False

    def __init__(self, group: dist.ProcessGroup, control: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._group = group
        self._control = control or group
        self.rank = self.global_rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_gather(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_gather`."""
        self.meet(label)
        work = _all_gather(
            self._group, buffer, buffer.view(self.world_size, -1)[self.rank], _GATHER_OPTIONS
        )
        return _FINISHED if work is None else work

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.reduce_scatter`."""
        self.meet(label)
        output = shard = buffer.view(self.world_size, -1)[self.rank]
        if buffer.is_complex():  # NCCL knows no complex numbers
            output, buffer = torch.view_as_real(shard), torch.view_as_real(buffer)
        work = _reduce_scatter(self._group, output, buffer, _REDUCE_OPTIONS)
        return Pending((shard, () if work is None else (work,)))

    def all_to_all(self, sent: Tensor, arriving: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_to_all`."""
        self.meet(label)
        # As bytes, because gloo does not know every dtype.
        work = dist.all_to_all_single(
            arriving.view(torch.uint8), sent.view(torch.uint8), group=self._group, async_op=True
        )
        return Pending((arriving, [work]))

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """See :meth:`LocalCollectives.all_reduce`."""
        self.meet(Meeting.SUM)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=self._group)
        return tensor

    def meet(self, label: int) -> None:
        """See :meth:`LocalCollectives.meet`; ranks compare at the end of the backward."""
        self.exchange_log.progress[1] += 1
        self.exchange_log.trace.append(label)

    def require_same_label(self, label: int, rank: int, other: int) -> None:
        """Raise :class:`DivergenceError` if ``other``, the label of ``rank``, is not ``label``."""
        if other != label:
            names = dist.get_process_group_ranks(self._group)
            log = self.exchange_log
            raise DivergenceError(
                f"The ranks run different things: rank {names[self.rank]} is about to"
                f" {log.describe(label)}, rank {names[rank]} to {log.describe(other)}.{LOOK_FOR}"
            )

    def agree(self, values: Tensor, meeting: Meeting = Meeting.AGREEMENT) -> Tensor:
        """See :meth:`LocalCollectives.agree`."""
        self.meet(meeting)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._control)
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """See :meth:`LocalCollectives.broadcast`."""
        self.meet(Meeting.VALUES)
        # As bytes, because gloo does not know every dtype.
        dist.broadcast(tensor.view(-1).view(torch.uint8), group_src=source, group=self._group)
        return tensor

    def all_gather_object(self, value: object) -> list[Any]:
        """See :meth:`LocalCollectives.all_gather_object`."""
        self.meet(Meeting.OBJECTS)
        values: list[object] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values


class ComparedCollectives(GroupCollectives):
    """Collectives of a group over gloo, before each of which every rank gets the others' labels.

    The host waits for that: ranks that are about to run different exchanges raise at once, instead
    of mixing their tensors or waiting for each other for ever. Sums are taken in rank order; gloo's
    own reduce-scatter would send twice the necessary bytes.
    """

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.reduce_scatter`."""
        exchange = self.all_to_all(buffer, torch.empty_like(buffer), label)
        return _RankedSum(buffer.view(self.world_size, -1)[self.rank], exchange)

    def meet(self, label: int) -> None:
        """See :meth:`LocalCollectives.meet`."""
        self._require_same_labels(label)
        super().meet(label)

    def _require_same_labels(self, label: int) -> None:
        with torch.inference_mode(False):
            mine = torch.tensor([label], device="cpu")
            labels = mine.repeat(self.world_size)
            dist.all_gather_into_tensor(labels, mine, group=self._control)
        for rank, other in enumerate(labels.tolist()):
            self.require_same_label(label, rank, other)
