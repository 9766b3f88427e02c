"""Dispatch: rank 0 reads for all ranks and sends each rank its batches.

The messages have a process group of their own, on CPU, so that they cannot meet the collectives of
the training step. A rank gets no other rank's batch, but the position after each row.
"""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from .base_feed import Pairs
from .tensor_pickle import dump


def dispatch(pairs: Pairs, group: dist.ProcessGroup, label: str) -> Pairs:
    """Yield this rank's batches, each with the position after its row.

    Args:
        pairs: on rank 0, the batches of all ranks, row by row and in rank order; read there alone.
        group: all ranks, on gloo.
        label: names rank and loader in errors.

    Raises:
        RuntimeError: rank 0, which reads for all ranks, failed.
    """
    return _send_rows(pairs, group) if dist.get_rank(group) == 0 else _receive(group, label)


def _send_rows(pairs: Pairs, group: dist.ProcessGroup) -> Pairs:
    others = range(1, dist.get_world_size(group))
    try:
        while row := list(islice(pairs, len(others) + 1)):
            position = row[-1][1]
            # The last row may lack the batches of the last ranks.
            for rank, (batch, _) in enumerate(row[1:], 1):
                _send((batch, position), rank, group)
            yield row[0][0], position
    except Exception as error:
        for rank in others:
            _send(f"{type(error).__name__}: {error}", rank, group)
        raise
    for rank in others:
        _send(None, rank, group)


def _send(message: Any, rank: int, group: dist.ProcessGroup) -> None:
    data = torch.frombuffer(dump(message), dtype=torch.uint8)
    dist.send(torch.tensor(len(data), device="cpu"), rank, group)
    dist.send(data, rank, group)


def _receive(group: dist.ProcessGroup, label: str) -> Pairs:
    while True:
        size = torch.tensor(0, device="cpu")
        dist.recv(size, 0, group)
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        dist.recv(data, 0, group)
        message = pickle.loads(data.numpy())  # type: ignore[arg-type]  # has a buffer
        del data
        if message is None:
            return
        if isinstance(message, str):
            raise RuntimeError(f"{label}: rank 0, which reads for all ranks, failed: {message}")
        yield message
        del message
