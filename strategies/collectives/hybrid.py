"""Hybrid sharding: groups of ranks share one copy of the model's shards each, and average their gradients with each other.

::

              shard 0   shard 1   shard 2
    replica 0  rank 0    rank 1    rank 2     gather and reduce-scatter run along a row (a node),
    replica 1  rank 3    rank 4    rank 5     the sum over replicas along a column

A step moves the weights inside rows only; between rows travels one shard of the gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .diary import Meeting
from .group import LocalCollectives, Pending


class HybridCollectives(LocalCollectives):
    """Shards along ``shards``, the same shards along ``replicas``; what concerns no shard goes to ``everyone``."""

    def __init__(self, shards: LocalCollectives, everyone: LocalCollectives, replicas: dist.ProcessGroup) -> None:
        self._shards, self._everyone, self._replicas = shards, everyone, replicas
        self.rank, self.world_size = shards.rank, shards.world_size
        self.global_rank, self.replicas = everyone.global_rank, dist.get_world_size(replicas)
        self.diary = everyone.diary = shards.diary

    @property
    def nbytes(self) -> int:
        """See :class:`LocalCollectives`."""
        return self._shards.nbytes + self._everyone.nbytes

    def allocate(self, nbytes: int, device: torch.device) -> Tensor:
        """See :meth:`LocalCollectives.allocate`."""
        return self._shards.allocate(nbytes, device)

    def meet(self, meeting: Meeting) -> None:
        """See :meth:`LocalCollectives.meet`."""
        self._everyone.meet(meeting)

    def all_gather(self, buffer: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.all_gather`."""
        return self._shards.all_gather(buffer, label)

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.reduce_scatter`; the sum is over all ranks."""
        return _OverReplicas(self._shards.reduce_scatter(buffer, label), self._replicas)

    def reduce_scatter_in(self, dtype: torch.dtype, buffer: Tensor, label: int = 0) -> Pending:
        """See :meth:`LocalCollectives.reduce_scatter_in`; between replicas fp32 travels."""
        return _OverReplicas(self._shards.reduce_scatter_in(dtype, buffer, label), self._replicas)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Over the shards of one replica, all of which hold the same."""
        return self._shards.all_reduce(tensor, op)

    def agree(self, values: Tensor) -> Tensor:
        """See :meth:`LocalCollectives.agree`."""
        return self._everyone.agree(values)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """From the first replica to all."""
        return self._everyone.broadcast(tensor, source)

    def all_gather_object(self, value: object) -> list[object]:
        """Of all ranks."""
        return self._everyone.all_gather_object(value)


class _OverReplicas(Pending):
    """The sum of a shard over replicas follows the sum inside each."""

    def __init__(self, inside: Pending, replicas: dist.ProcessGroup) -> None:
        super().__init__(torch.empty(0))
        self._inside, self._replicas = inside, replicas

    def wait(self) -> Tensor:
        """See :meth:`Pending.wait`."""
        total = self._inside.wait()
        dist.all_reduce(total, group=self._replicas)
        return total
