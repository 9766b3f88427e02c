"""Collectives over gloo on the CPU, as direct messages between pairs of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .process_group import GroupCollectives, Pending, Work

_send, _recv = dist.ProcessGroup.send, dist.ProcessGroup.recv


class PairwiseCollectives(GroupCollectives):
    """Collectives that send straight from, and receive straight into, the memory of the data.

    gloo's reduce-scatter sends twice the necessary bytes, and its all-gather copies through a
    scratch buffer as big as the result; this class does neither. It sums in rank order, whatever
    arrives first, so results do not depend on timing.

    Every exchange begins with its label. Ranks that are about to run different exchanges raise at
    once, instead of mixing their tensors or waiting for each other for ever.
    """

    # Message tags. hazard: payloads of different exchanges must never meet, so the tag of a payload
    # includes the label.
    _LABEL, _GATHER, _REDUCE, _TAGS = 0, 1, 2, 3

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.others = [r for r in range(self.world_size) if r != self.rank]
        self._staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._staged_bytes = 0  # bytes of the staging that sums in flight use
        self._sums_in_flight = 0

    def all_gather(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_gather`."""
        shards = buffer.view(self.world_size, -1)
        sent = [shards[self.rank]] * self.world_size
        return Pending(buffer, self._begin_exchange(label, self._GATHER, shards, sent))

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.reduce_scatter`."""
        self.exchange_log.progress[1] += 1
        tag = self._REDUCE + self._TAGS * label
        works: list[Any] = [self._exchange_label(label)]
        shards = buffer.view(self.world_size, -1)
        staging = self._reserve_staging(shards.shape[1], buffer.dtype)
        works += [_send(self._group, [shards[r]], r, tag) for r in self.others]
        return _OrderedSum(self, tag, shards, staging, works)

    def all_to_all(self, sent: Tensor, arriving: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_to_all`."""
        parts, rows = sent.view(self.world_size, -1), arriving.view(self.world_size, -1)
        works = self._begin_exchange(label, self._REDUCE, rows, parts)
        rows[self.rank].copy_(parts[self.rank])
        return Pending(arriving, works)

    def _begin_exchange(
        self,
        label: int,
        kind: int,
        arriving: Sequence[Tensor] | Tensor,
        sent: Sequence[Tensor] | Tensor,
    ) -> list[Any]:
        """Begin to send ``sent[r]`` to each rank r and to receive ``arriving[r]`` from it."""
        self.exchange_log.progress[1] += 1
        tag = kind + self._TAGS * label
        works: list[Any] = [self._exchange_label(label)]
        works += [_recv(self._group, [arriving[r]], r, tag) for r in self.others]
        works += [_send(self._group, [sent[r]], r, tag) for r in self.others]
        return works

    def meet(self, label: int) -> None:
        """See :meth:`LocalCollectives.meet`."""
        self.exchange_log.progress[1] += 1
        self._exchange_label(label).wait()

    def _exchange_label(self, label: int) -> _LabelExchange:
        """Begin to send ``label`` to the other ranks and to receive theirs."""
        labels = torch.full((self.world_size, 1), label, device="cpu")
        works = [_recv(self._control, [labels[r]], r, self._LABEL) for r in self.others]
        works += [_send(self._control, [labels[self.rank]], r, self._LABEL) for r in self.others]
        return _LabelExchange(self, labels, works)

    def _reserve_staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory [1 or 2, numel] for arriving shards that no other sum in flight uses."""
        rows = min(2, len(self.others))
        if not self._sums_in_flight:
            self._staged_bytes = 0
        self._sums_in_flight += 1
        start = self._staged_bytes
        end = self._staged_bytes = start + rows * numel * dtype.itemsize
        if end > self._staging.numel():
            # Sums in flight keep references to the smaller staging.
            self._staging = torch.empty(end, dtype=torch.uint8, device="cpu")
        return self._staging[start:end].view(dtype).view(rows, numel)


class _LabelExchange:
    """The label of an exchange on its way to and from the other ranks.

    Args:
        labels: [world_size, 1], of each rank; this rank's is there, the others arrive.
        works: sends and receives in flight.
    """

    def __init__(
        self, communicator: PairwiseCollectives, labels: Tensor, works: list[dist.Work]
    ) -> None:
        self._communicator, self._labels, self._works = communicator, labels, works

    def wait(self) -> None:
        """Wait until all labels are there; raise if one differs."""
        for work in self._works:
            work.wait()
        labels = self._labels.flatten().tolist()
        for rank, label in enumerate(labels):
            self._communicator.require_same_label(labels[self._communicator.rank], rank, label)


class _OrderedSum(Pending):
    """Receives shards of the other ranks one after another and adds them in rank order.

    Args:
        tag: of the messages.
        shards: [world_size, shard], this rank's summands; the sum lands in this rank's row.
        staging: [1 or 2, shard], memory for arriving shards.
        works: the exchange of the label first, then the sends.
    """

    def __init__(
        self,
        communicator: PairwiseCollectives,
        tag: int,
        shards: Tensor,
        staging: Tensor,
        works: list[Any],
    ) -> None:
        super().__init__(shards[communicator.rank], works)
        self._communicator, self._tag = communicator, tag
        # The first two can arrive while the caller computes; more would need more memory.
        self._arriving = [
            (_recv(communicator._group, [staging[k]], r, tag), staging[k])
            for k, r in enumerate(communicator.others[:2])
        ]

    def wait(self) -> Tensor:
        """See :meth:`Work.wait`."""
        self._works[0].wait()  # hazard: the shard of a rank with another label never arrives
        total, k = None, 0
        for source in range(self._communicator.world_size):
            if source == self._communicator.rank:
                # From here on the sum lies in the buffer, so the staging is free when all shards
                # have arrived.
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
            if part is not total and len(self._arriving) < len(self._communicator.others):
                # The sum has read this half of the staging: the next shard may arrive in it.
                following = self._communicator.others[len(self._arriving)]
                self._arriving.append(
                    (_recv(self._communicator._group, [part], following, self._tag), part)
                )
        for sending in self._works[1:]:
            sending.wait()  # hazard: the caller overwrites shards that are still being sent
        self._communicator._sums_in_flight -= 1
        return self._result
