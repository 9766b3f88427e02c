"""gloo on the CPU by direct exchange between pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange_log import Meeting
from .process_group import GroupCollectives, Pending, Work

# Bound here, so that nobody who watches the group's methods is asked in each exchange.
_send, _recv = dist.ProcessGroup.send, dist.ProcessGroup.recv


class PairwiseCollectives(GroupCollectives):
    """Exchanges straight between the places that the data lives in.

    gloo's reduce-scatter sends twice the necessary bytes and its all-gather copies through a
    scratch buffer as big as the result; this does neither. Sums are taken in rank order, whatever
    arrives first, so results do not depend on timing.

    Every exchange begins with its label. Ranks that exchange different things find out at once,
    instead of mixing them or waiting for each other for ever.
    """

    # Message tags. A payload's tag includes its label, so that payloads of different exchanges
    # never meet.
    _LABEL, _AGREE, _GATHER, _REDUCE, _TAGS = 0, 1, 2, 3, 4

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._labels: dict[int, Tensor] = {}
        self._spare: list[Tensor] = []  # for labels to arrive in
        self._votes: dict[int, Tensor] = {}  # number of values -> [world_size, numel]
        self._others = [r for r in range(self.world_size) if r != self.rank]
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._staged = 0  # bytes of it taken by sums in flight
        self._in_flight = 0

    @property
    def nbytes(self) -> int:
        """See :meth:`LocalCollectives.nbytes`."""
        return self._staging.nbytes

    def all_gather(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_gather`."""
        shards = buffer.view(self.world_size, -1)
        return Pending(
            buffer, self._trade(label, self._GATHER, shards, [shards[self.rank]] * self.world_size)
        )

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.reduce_scatter`."""
        self.exchange_log.progress[1] += 1
        tag = self._REDUCE + self._TAGS * label
        works: list[Any] = [self._exchange_label(label)]
        shards = buffer.view(self.world_size, -1)
        staging = self._stage(shards.shape[1], buffer.dtype)
        works += [_send(self._group, [shards[r]], r, tag) for r in self._others]
        return _OrderedSum(self, tag, shards, staging, works)

    def all_to_all(self, sent: Tensor, arriving: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_to_all`."""
        parts, rows = sent.view(self.world_size, -1), arriving.view(self.world_size, -1)
        works = self._trade(label, self._REDUCE, rows, parts)
        rows[self.rank].copy_(parts[self.rank])
        return Pending(arriving, works)

    def _trade(
        self,
        label: int,
        kind: int,
        arriving: Sequence[Tensor] | Tensor,
        sent: Sequence[Tensor] | Tensor,
    ) -> list[Any]:
        """Begin to send row r of ``sent`` to rank r and to receive row r of ``arriving`` from
        it.
        """
        self.exchange_log.progress[1] += 1
        tag = kind if label < 0 else kind + self._TAGS * label
        works: list[Any] = [self._exchange_label(label)]
        works += [_recv(self._group, [arriving[r]], r, tag) for r in self._others]
        works += [_send(self._group, [sent[r]], r, tag) for r in self._others]
        return works

    def meet(self, meeting: Meeting) -> None:
        """See :meth:`LocalCollectives.meet`."""
        self._exchange_label(meeting).wait()

    def _exchange_label(self, label: int) -> _SameLabel:
        mine = self._labels.get(label)
        if mine is None:
            mine = self._labels[label] = torch.tensor([label], device="cpu")
        theirs = [
            self._spare.pop() if self._spare else torch.empty(1, dtype=torch.int64, device="cpu")
            for _ in self._others
        ]
        works = [
            _recv(self._control, [t], r, self._LABEL)
            for t, r in zip(theirs, self._others, strict=True)
        ]
        works += [_send(self._control, [mine], r, self._LABEL) for r in self._others]
        return _SameLabel(self, label, theirs, works)

    def agree(self, values: Tensor, meeting: Meeting = Meeting.AGREEMENT) -> Tensor:
        """See :meth:`LocalCollectives.agree`."""
        if self.world_size > 8:  # pairs grow with the square of ranks
            self.meet(meeting)
            return super().agree(values, meeting)
        numel = values.numel()
        if numel not in self._votes:
            with torch.inference_mode(False):  # others will vote outside of it
                self._votes[numel] = torch.empty(
                    self.world_size, numel, dtype=torch.int64, device="cpu"
                )
        votes = self._votes[numel]
        votes[self.rank] = values
        for work in self._trade(meeting, self._AGREE, votes, [votes[self.rank]] * self.world_size):
            work.wait()
        return torch.amax(votes, 0, out=values)

    def _stage(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory [1 or 2, numel] for arriving shards, which no other sum in flight uses."""
        rows = min(2, len(self._others))
        if not self._in_flight:
            self._staged = 0
        self._in_flight += 1
        start, self._staged = self._staged, self._staged + rows * numel * dtype.itemsize
        if self._staged > self._staging.numel():
            # sums in flight keep the smaller one
            self._staging = torch.empty(self._staged, dtype=torch.uint8, device="cpu")
        return self._staging[start : self._staged].view(dtype).view(rows, numel)


class _SameLabel:
    """The label of an exchange on its way to and from the other ranks."""

    def __init__(
        self,
        communicator: PairwiseCollectives,
        label: int,
        theirs: list[Tensor],
        works: list[dist.Work],
    ) -> None:
        self._communicator, self._label, self._theirs, self._works = (
            communicator,
            label,
            theirs,
            works,
        )

    def wait(self) -> None:
        """Until all labels are there; raises if they differ."""
        for work in self._works:
            work.wait()
        for rank, tensor in zip(self._communicator._others, self._theirs, strict=True):
            self._communicator.require_same_label(self._label, rank, int(tensor))
        self._communicator._spare += self._theirs


class _OrderedSum(Pending):
    """Receives shards of the other ranks one after another and adds them in rank order."""

    def __init__(
        self,
        communicator: PairwiseCollectives,
        tag: int,
        shards: Tensor,
        staging: Tensor,
        works: list[Any],
    ) -> None:
        # of [world, shard]; the label, then what is sent
        super().__init__(shards[communicator.rank], works)
        self._communicator, self._tag = communicator, tag
        # The first two can arrive while the caller computes; more would need more memory.
        self._arriving = [
            (_recv(communicator._group, [staging[k]], r, tag), staging[k])
            for k, r in enumerate(communicator._others[:2])
        ]

    def wait(self) -> Tensor:
        """See :meth:`Work.wait`."""
        self._works[0].wait()
        total, k = None, 0
        for source in range(self._communicator.world_size):
            if source == self._communicator.rank:
                # From here on the sum lies in the buffer: the staging is free when all have
                # arrived.
                total = (
                    self._result
                    if total is None
                    else torch.add(total, self._result, out=self._result)
                )
                continue
            work, part = self._arriving[k]
            work.wait()
            k += 1
            total = part if total is None else total.add_(part)
            if part is not total and len(self._arriving) < len(self._communicator._others):
                # This half of the staging has been read: the next shard may come into it.
                following = self._communicator._others[len(self._arriving)]
                self._arriving.append(
                    (_recv(self._communicator._group, [part], following, self._tag), part)
                )
        for work in self._works[1:]:
            work.wait()
        self._communicator._in_flight -= 1
        return self._result
