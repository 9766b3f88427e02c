"""Hybrid sharding: groups of ranks share one copy of the model's shards each, and average their
gradients with each other.

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

from .process_group import LocalCollectives, Pending, Work


class HybridCollectives(LocalCollectives):
    """Shards along ``shards``, the same shards along ``replicas``; what concerns no shard goes to
    ``everyone``.
    """

    alone = False

    def __init__(
        self, shards: LocalCollectives, everyone: LocalCollectives, replicas: dist.ProcessGroup
    ) -> None:
        self._shards, self._everyone, self._replicas = shards, everyone, replicas
        self.rank, self.world_size = shards.rank, shards.world_size
        self.global_rank, self.replicas = everyone.global_rank, dist.get_world_size(replicas)
        self.exchange_log = everyone.exchange_log = shards.exchange_log
        # along a row; all rows hold the same
        for name in (
            "allocate",
            "all_gather",
            "all_to_all",
            "all_reduce",
        ):
            setattr(self, name, getattr(shards, name))
        for name in ("meet", "agree", "broadcast", "all_gather_object"):
            setattr(self, name, getattr(everyone, name))

    @property
    def nbytes(self) -> int:
        """See :class:`LocalCollectives`."""
        return self._shards.nbytes + self._everyone.nbytes

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.reduce_scatter`; the sum is over all ranks."""
        return _OverReplicas(self._shards.reduce_scatter(buffer, label), self._replicas)

    def reduce_scatter_in(
        self, dtype: torch.dtype, buffer: Tensor, room: Tensor, label: int = 0
    ) -> Work:
        """See :meth:`LocalCollectives.reduce_scatter_in`; between replicas fp32 travels."""
        return _OverReplicas(
            self._shards.reduce_scatter_in(dtype, buffer, room, label), self._replicas
        )


class _OverReplicas(Pending):
    """The sum of a shard over replicas follows the sum inside each."""

    def __init__(self, inside: Work, replicas: dist.ProcessGroup) -> None:
        super().__init__(torch.empty(0, device="cpu"))
        self._inside, self._replicas = inside, replicas

    def wait(self) -> Tensor:
        """See :meth:`Work.wait`."""
        total = self._inside.wait()
        dist.all_reduce(total, group=self._replicas)
        return total
