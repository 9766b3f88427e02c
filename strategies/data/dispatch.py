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

_LARGE = 4096  # bytes of a tensor that travels beside the pickle, which would copy it

# hazard: a message whose buffer is freed before it was sent never arrives, as when a loop is given
# up. So these are not variables of the loop.
_IN_FLIGHT: list[tuple[Any, torch.Tensor]] = []


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
            # Rank 0 reads this row while the row before travels.
            _finish_sending()
            position = row[-1][1]
            # The last row may lack the batches of the last ranks.
            for rank, (batch, _) in enumerate(row[1:], 1):
                _send((batch, position), rank, group)
            yield row[0][0], position
    except Exception as error:
        for rank in others:
            _send(f"{type(error).__name__}: {error}", rank, group)
        _finish_sending()
        raise
    for rank in others:
        _send(None, rank, group)
    _finish_sending()


def _send(message: Any, rank: int, group: dist.ProcessGroup) -> None:
    """Send how many parts there are, their sizes, the pickle, and the large tensors beside it."""
    buffers: list[Any] = []

    def take_out(buffer: pickle.PickleBuffer) -> bool:
        is_large = buffer.raw().nbytes >= _LARGE
        if is_large:
            buffers.append(buffer.raw())
        return not is_large

    data = dump(message, take_out)
    parts = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in (data, *buffers)]
    sizes = torch.tensor([len(part) for part in parts], device="cpu")
    for part in (torch.tensor(len(parts), device="cpu"), sizes, *parts):
        _IN_FLIGHT.append((dist.isend(part, rank, group), part))


def _finish_sending() -> None:
    for work, _ in _IN_FLIGHT:
        work.wait()
    _IN_FLIGHT.clear()


def _receive(group: dist.ProcessGroup, label: str) -> Pairs:
    def receive(size: int, dtype: torch.dtype) -> torch.Tensor:
        part = torch.empty(size, dtype=dtype, device="cpu")
        dist.recv(part, 0, group)
        return part

    while True:
        sizes = receive(int(receive(1, torch.int64)), torch.int64)
        data, *buffers = [receive(size, torch.uint8).numpy() for size in sizes.tolist()]
        message = pickle.loads(data.tobytes(), buffers=buffers)
        del buffers
        if message is None:
            return
        if isinstance(message, str):
            raise RuntimeError(f"{label}: rank 0, which reads for all ranks, failed: {message}")
        yield message
        del message
