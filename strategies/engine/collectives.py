"""The one door to ``torch.distributed``: every byte the engine exchanges goes through one of these objects.

Tests substitute the object to count, delay or break a collective.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, MutableSequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

from .wire import RoundedSum

# The process group's own methods, under their names before and since torch 2.13: the functions of torch.distributed around
# them add seven Python calls to each collective.
_all_gather = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_reduce_scatter = getattr(dist.ProcessGroup, "reduce_scatter_single", None) or dist.ProcessGroup._reduce_scatter_base


def _on_current_stream(options: Any) -> Any:
    options.asyncOp = False
    return options


_GATHER_OPTIONS = _on_current_stream(AllgatherOptions())
_REDUCE_OPTIONS = _on_current_stream(ReduceScatterOptions())  # a sum, unless said otherwise


class Pending:
    """A collective in flight. ``wait()`` returns its result and is called once."""

    def __init__(self, result: Tensor, works: list[Any] | None = None) -> None:
        self._result = result
        self._works = works or []

    def wait(self) -> Tensor:
        """Block the host (CPU) or the current stream (CUDA) until the result is there."""
        for work in self._works:
            work.wait()
        return self._result


class DivergenceError(RuntimeError):
    """Ranks exchange different things: one took another branch, or ran another number of steps."""


class Meeting(enum.IntEnum):
    """Labels of exchanges that concern no unit, and what a rank is about to do there."""

    description: str

    AGREEMENT = -1, "end its backward pass (or its part in an evaluation step)"
    SUM = -2, "reduce a value over the ranks (a logged value, a norm, an early stop)"
    VALUES = -3, "broadcast or all-gather values"
    OBJECTS = -4, "broadcast or collect Python objects (a path, a plan)"
    BARRIER = -5, "wait for the others at a barrier"

    def __new__(cls, label: int, description: str) -> Meeting:
        """A member that is its label."""
        member = int.__new__(cls, label)
        member._value_, member.description = label, description
        return member


class LocalCollectives:
    """One rank: everything is already where it belongs.

    Attributes:
        rank: among the ranks that share the model's shards, ``world_size`` in number.
        global_rank: among all ranks: ``replicas`` groups that share shards.
        trace: since when (a number that all ranks have then, or -1), then the labels of the exchanges since; another thread may
            look at it.
        describe: what a label stands for, for errors.
        progress: index of the unit whose forward or backward ran last, and exchanges begun; others may look at it.
    """

    rank = 0
    world_size = 1
    global_rank = 0
    replicas = 1

    def __init__(self) -> None:
        self._agreements = self._resumed = 0
        self.trace = [0]
        self.describe: Callable[[int], str] = str
        self.progress: MutableSequence[int] | memoryview = [-1, 0]

    @property
    def nbytes(self) -> int:
        """Of memory that is held between exchanges."""
        return 0

    def agreed(self) -> None:
        """All ranks have compared what they did so far."""
        self._agreements, self._resumed = self._agreements + 1, 0
        self.trace[:] = [self._agreements << 16]

    def forget_trace(self) -> None:
        """From here on it cannot be told which exchange of this rank belongs to which of another."""
        self.trace[:] = [-1]

    def resume_trace(self) -> None:
        """From here on it can, if it could not: all ranks begin a step."""
        if self.trace[0] < 0:
            self._resumed += 1
            self.trace[:] = [(self._agreements << 16) + self._resumed]

    def meet(self, meeting: Meeting) -> None:
        """Raise :class:`DivergenceError` unless all ranks come to the same meeting, where that can be told."""

    def all_gather(self, buffer: Tensor, label: int = 0) -> Pending:
        """Fill ``buffer`` [world_size * shard] in place; rank r has put its shard at ``[r * shard, (r + 1) * shard)``."""
        return Pending(buffer)

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Pending:
        """Sum ``buffer`` [world_size * shard] over ranks; the result is this rank's shard [shard] of the sum.

        The result may be part of ``buffer``, which is overwritten.
        """
        return Pending(buffer)

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory [nbytes, uint8] that :meth:`all_gather` and :meth:`reduce_scatter` are fastest in; collective."""
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def all_to_all(self, sent: Tensor, arriving: Tensor, label: int = 0) -> Pending:
        """Send part r of ``sent`` [world_size * part] to rank r; part r of ``arriving`` is what rank r sends here."""
        return Pending(arriving.copy_(sent))

    def reduce_scatter_in(self, dtype: torch.dtype, buffer: Tensor, label: int = 0) -> Pending | RoundedSum:
        """As :meth:`reduce_scatter` for fp32, but what travels is rounded to ``dtype``."""
        return RoundedSum(self, buffer, dtype, label)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce ``tensor`` over ranks in place ("sum", "max", "min")."""
        return tensor

    def agree(self, values: Tensor) -> Tensor:
        """Elementwise maximum of an int64 CPU tensor over ranks; host side only, never waits for a device."""
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Copy contiguous ``tensor`` of rank ``source`` to all ranks in place."""
        return tensor

    def all_gather_object(self, value: object) -> list[object]:
        """``value`` of every rank, in rank order."""
        return [value]


class GroupCollectives(LocalCollectives):
    """Collectives of a process group (NCCL, or gloo with CUDA tensors)."""

    def __init__(self, group: dist.ProcessGroup, control: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self._group = group
        self._control = control or group
        self.rank = self.global_rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def all_gather(self, buffer: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.all_gather`."""
        self.progress[1] += 1
        self.trace.append(label)
        work = _all_gather(self._group, buffer, buffer.view(self.world_size, -1)[self.rank], _GATHER_OPTIONS)
        return Pending(buffer, [work] if work is not None else None)

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.reduce_scatter`."""
        self.progress[1] += 1
        self.trace.append(label)
        shard = buffer.view(self.world_size, -1)[self.rank]
        work = _reduce_scatter(self._group, shard, buffer, _REDUCE_OPTIONS)
        return Pending(shard, [work] if work is not None else None)

    def all_to_all(self, sent: Tensor, arriving: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.all_to_all`."""
        self.progress[1] += 1
        self.trace.append(label)
        # As bytes: gloo does not know every dtype.
        dist.all_to_all_single(arriving.view(torch.uint8), sent.view(torch.uint8), group=self._group)
        return Pending(arriving)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """See :meth:`LocalCollectives.all_reduce`."""
        self.meet(Meeting.SUM)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()), group=self._group)
        return tensor

    def meet(self, meeting: Meeting) -> None:
        """See :meth:`LocalCollectives.meet`; it can be told at the end of the backward."""
        self.trace.append(meeting)

    def agree(self, values: Tensor) -> Tensor:
        """See :meth:`LocalCollectives.agree`."""
        self.progress[1] += 1
        self.trace.append(Meeting.AGREEMENT)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._control)
        return values

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """See :meth:`LocalCollectives.broadcast`."""
        self.meet(Meeting.VALUES)
        # As bytes: gloo does not know every dtype.
        dist.broadcast(tensor.view(-1).view(torch.uint8), group_src=source, group=self._group)
        return tensor

    def all_gather_object(self, value: object) -> list[object]:
        """See :meth:`LocalCollectives.all_gather_object`."""
        self.meet(Meeting.OBJECTS)
        values: list[object] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values


class PairwiseCollectives(GroupCollectives):
    """gloo on the CPU by direct exchange between pairs of ranks.

    gloo's reduce-scatter sends twice the necessary bytes and its all-gather copies through a scratch buffer as big as
    the result; an exchange straight between the places the data lives in does neither. Sums are taken in rank order,
    whatever arrives first, so results do not depend on timing.

    Every exchange begins with its label. Ranks that exchange different things find out at once, instead of mixing them or
    waiting for each other for ever.
    """

    # Message tags. A payload's tag includes its label, so that payloads of different exchanges never meet.
    _LABEL, _AGREE, _GATHER, _REDUCE, _TAGS = 0, 1, 2, 3, 4

    def __init__(self, group: dist.ProcessGroup, control: dist.ProcessGroup | None = None) -> None:
        super().__init__(group, control)
        self._labels: dict[int, Tensor] = {}
        self._spare: list[Tensor] = []  # for labels to arrive in
        self._held_ballots: dict[int, list[Tensor]] = {}
        self._others = [r for r in range(self.world_size) if r != self.rank]
        self._names = dist.get_process_group_ranks(group)
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._staged = 0  # bytes of it taken by sums in flight
        self._in_flight = 0

    @property
    def nbytes(self) -> int:
        """See :meth:`LocalCollectives.nbytes`."""
        return self._staging.nbytes

    def all_gather(self, buffer: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.all_gather`."""
        self.progress[1] += 1
        tag = self._GATHER + self._TAGS * label
        works: list[Any] = [self._exchange_label(label)]
        shards = buffer.view(self.world_size, -1)
        works += [self._group.recv([shards[r]], r, tag) for r in self._others]
        works += [self._group.send([shards[self.rank]], r, tag) for r in self._others]
        return Pending(buffer, works)

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.reduce_scatter`."""
        self.progress[1] += 1
        tag = self._REDUCE + self._TAGS * label
        works: list[Any] = [self._exchange_label(label)]
        shards = buffer.view(self.world_size, -1)
        staging = self._stage(shards.shape[1], buffer.dtype)
        works += [self._group.send([shards[r]], r, tag) for r in self._others]
        return _OrderedSum(shards, self.rank, staging, works, lambda t, r: self._group.recv([t], r, tag), self._landed)

    def all_to_all(self, sent: Tensor, arriving: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.all_to_all`."""
        self.progress[1] += 1
        tag = self._REDUCE + self._TAGS * label
        works: list[Any] = [self._exchange_label(label)]
        parts, rows = sent.view(self.world_size, -1), arriving.view(self.world_size, -1)
        works += [self._group.recv([rows[r]], r, tag) for r in self._others]
        works += [self._group.send([parts[r]], r, tag) for r in self._others]
        rows[self.rank].copy_(parts[self.rank])
        return Pending(arriving, works)

    def meet(self, meeting: Meeting) -> None:
        """See :meth:`LocalCollectives.meet`."""
        self._exchange_label(meeting).wait()

    def _exchange_label(self, label: int) -> _SameLabel:
        mine = self._labels.get(label)
        if mine is None:
            mine = self._labels[label] = torch.tensor([label])
        theirs = [self._spare.pop() if self._spare else torch.empty(1, dtype=torch.int64) for _ in self._others]
        works = [self._control.recv([t], r, self._LABEL) for t, r in zip(theirs, self._others, strict=True)]
        works += [self._control.send([mine], r, self._LABEL) for r in self._others]
        return _SameLabel(self, label, theirs, works)

    def check_labels(self, label: int, theirs: list[Tensor]) -> None:
        """Raise if another rank exchanges something else than ``label``."""
        for rank, tensor in zip(self._others, theirs, strict=True):
            self.require_same_label(label, rank, int(tensor))
        self._spare += theirs

    def require_same_label(self, label: int, rank: int, other: int) -> None:
        """Raise if ``rank`` exchanges ``other`` and not ``label``."""
        if other != label:
            raise DivergenceError(
                f"The ranks run different things: rank {self._names[self.rank]} is about to {self.describe(label)}, rank "
                f"{self._names[rank]} to {self.describe(other)}. All ranks must run the same modules in the same order and "
                "take the same number of steps; look for a branch or a loop that depends on a rank's own data."
            )

    def agree(self, values: Tensor) -> Tensor:
        """See :meth:`LocalCollectives.agree`."""
        self.meet(Meeting.AGREEMENT)
        if self.world_size > 8:  # pairs grow with the square of ranks
            return super().agree(values)
        self.progress[1] += 1
        sent, *theirs = self._ballots(values.numel())
        sent.copy_(values)
        works = [self._control.recv([t], r, self._AGREE) for t, r in zip(theirs, self._others, strict=True)]
        works += [self._control.send([sent], r, self._AGREE) for r in self._others]
        for work in works:
            work.wait()
        for other in theirs:
            torch.maximum(values, other, out=values)
        return values

    def _ballots(self, numel: int) -> list[Tensor]:
        if numel not in self._held_ballots:
            self._held_ballots[numel] = [torch.empty(numel, dtype=torch.int64) for _ in range(self.world_size)]
        return self._held_ballots[numel]

    def _stage(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory [1 or 2, numel] for arriving shards, which no other sum in flight uses."""
        rows = min(2, len(self._others))
        if not self._in_flight:
            self._staged = 0
        self._in_flight += 1
        start, self._staged = self._staged, self._staged + rows * numel * dtype.itemsize
        if self._staged > self._staging.numel():
            self._staging = torch.empty(self._staged, dtype=torch.uint8)  # sums in flight keep the smaller one
        return self._staging[start : self._staged].view(dtype).view(rows, numel)

    def _landed(self) -> None:
        self._in_flight -= 1


class _SameLabel:
    """The label of an exchange on its way to and from the other ranks."""

    def __init__(self, door: PairwiseCollectives, label: int, theirs: list[Tensor], works: list[dist.Work]) -> None:
        self._door, self._label, self._theirs, self._works = door, label, theirs, works

    def wait(self) -> None:
        """Until all labels are there; raises if they differ."""
        for work in self._works:
            work.wait()
        self._door.check_labels(self._label, self._theirs)


class _OrderedSum(Pending):
    """Receives shards of the other ranks one after another and adds them in rank order."""

    def __init__(
        self,
        shards: Tensor,  # [world, shard]
        rank: int,
        staging: Tensor,  # [1 or 2, shard]
        works: list[Any],  # the label, then what is sent
        receive: Callable[[Tensor, int], dist.Work],
        landed: Callable[[], None],
    ) -> None:
        super().__init__(shards[rank], works)
        self._sources = [r for r in range(len(shards)) if r != rank]
        self._rank, self._receive, self._landed = rank, receive, landed
        # The first two can arrive while the caller computes; more would need more memory.
        self._arriving = [(receive(staging[k], r), staging[k]) for k, r in enumerate(self._sources[:2])]

    def wait(self) -> Tensor:
        """See :meth:`Pending.wait`."""
        self._works[0].wait()
        total, k = None, 0
        for source in range(len(self._sources) + 1):
            if source == self._rank:
                # From here on the sum lies in the buffer: the staging is free when all have arrived.
                total = self._result if total is None else torch.add(total, self._result, out=self._result)
                continue
            work, part = self._arriving[k]
            work.wait()
            k += 1
            total = part if total is None else total.add_(part)
            if part is not total and len(self._arriving) < len(self._sources):
                # This half of the staging has been read: the next shard may come into it.
                self._arriving.append((self._receive(part, self._sources[len(self._arriving)]), part))
        for work in self._works[1:]:
            work.wait()
        self._landed()
        return self._result
