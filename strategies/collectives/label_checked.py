"""Collectives before each of which ranks compare labels: for gloo with CUDA tensors.

There the host waits for each exchange anyway.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .exchange_log import Meeting
from .process_group import GroupCollectives, Work


class ComparedCollectives(GroupCollectives):
    """Collectives of a group, before each of which every rank gets the labels of the others.

    Ranks that are about to run different exchanges raise at once, instead of mixing their tensors
    or waiting for each other for ever.
    """

    def meet(self, meeting: Meeting) -> None:
        """See :meth:`LocalCollectives.meet`."""
        self._require_same_labels(meeting)
        super().meet(meeting)

    def all_gather(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_gather`."""
        self._require_same_labels(label)
        return super().all_gather(buffer, label)

    def reduce_scatter(self, buffer: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.reduce_scatter`."""
        self._require_same_labels(label)
        return super().reduce_scatter(buffer, label)

    def all_to_all(self, sent: Tensor, arriving: Tensor, label: int = 0) -> Work:
        """See :meth:`LocalCollectives.all_to_all`."""
        self._require_same_labels(label)
        return super().all_to_all(sent, arriving, label)

    def agree(self, values: Tensor, meeting: Meeting = Meeting.AGREEMENT) -> Tensor:
        """See :meth:`LocalCollectives.agree`."""
        self._require_same_labels(meeting)
        return super().agree(values, meeting)

    def _require_same_labels(self, label: int) -> None:
        with torch.inference_mode(False):
            labels = list(torch.empty(self.world_size, 1, dtype=torch.int64, device="cpu"))
            dist.all_gather(labels, torch.tensor([label], device="cpu"), group=self._control)
        for rank, other in enumerate(labels):
            self.require_same_label(label, rank, int(other))
