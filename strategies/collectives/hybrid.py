"""Hybrid sharding: each group of ranks holds one sharded replica, and groups sum their gradients.

::

              shard 0   shard 1   shard 2
    replica 0  rank 0    rank 1    rank 2     gather and reduce-scatter run along a row (a node),
    replica 1  rank 3    rank 4    rank 5     the sum over replicas along a column

In a step weights travel inside rows only, and one shard of the gradients travels between rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .process_group import LocalCollectives, Work


class HybridCollectives(LocalCollectives):
    """A communicator over the ranks of one replica, of the same shard, and of all.

    Args:
        shards: the ranks that share one replica (a row).
        everyone: all ranks; exchanges that concern no shard go there.
        replicas: the ranks that have the same shard (a column).
    """

    alone = False

    def __init__(
        self, shards: LocalCollectives, everyone: LocalCollectives, replicas: dist.ProcessGroup
    ) -> None:
        self._replicas = replicas
        self.rank, self.world_size = shards.rank, shards.world_size
        self.global_rank, self.replicas = everyone.global_rank, dist.get_world_size(replicas)
        self.exchange_log = everyone.exchange_log = shards.exchange_log
        # These stay within a row, because all rows have the same values.
        for name in ("allocate", "all_gather", "all_to_all", "all_reduce"):
            setattr(self, name, getattr(shards, name))
        for name in ("meet", "agree", "broadcast", "all_gather_object"):
            setattr(self, name, getattr(everyone, name))
        # These sum over all ranks; replicas exchange fp32.
        for name in ("reduce_scatter", "reduce_scatter_in"):
            setattr(self, name, partial(self._sum_over_replicas, getattr(shards, name)))

    def _sum_over_replicas(self, reduce: Callable[..., Work], *args: Any) -> Work:
        return _OverReplicas(reduce(*args), self._replicas)


class _OverReplicas:
    """Sums a shard over replicas when the reduce-scatter inside this replica is done."""

    def __init__(self, in_replica: Work, replicas: dist.ProcessGroup) -> None:
        self._in_replica, self._replicas = in_replica, replicas

    def wait(self) -> Tensor:
        """See :meth:`Work.wait`."""
        total = self._in_replica.wait()
        dist.all_reduce(total, group=self._replicas)
        return total
