"""Copies batches to the device before the loop gets them: pinned, non-blocking, one batch ahead."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device

from .base_feed import Pairs


def place_on(device: torch.device, pairs: Pairs, ahead: bool) -> Pairs:
    """Yield (batch, position) pairs with the batches on the device.

    With ``ahead``, the next batch is fetched and copied on a stream of its own before the loop gets
    the current one. The position travels with its batch, so that the batch ahead does not count.
    """
    placed = map(lambda pair: (move_data_to_device(pair[0], device), pair[1]), pairs)
    return _read_ahead(placed, device) if ahead and device.type == "cuda" else placed


def _read_ahead(placed: Pairs, device: torch.device) -> Pairs:
    stream = torch.cuda.Stream(device)
    # Yielded from here, as a variable would keep a batch that the loop has dropped.
    fetched: deque[Any] = deque()

    def fetch() -> None:
        with torch.cuda.stream(stream):
            fetched.append(next(placed, None))

    fetch()
    while fetched[0] is not None:
        compute = torch.cuda.current_stream(device)
        # hazard: the compute stream must not read the batch before its copy is done.
        compute.wait_stream(stream)
        # hazard: the batches' memory belongs to the copy stream. When the loop frees one that the
        # compute stream still reads, the next copy may overwrite it, so it waits for what the
        # compute stream has to do by now. The step with this batch comes after that.
        stream.wait_stream(compute)
        fetch()
        yield fetched.popleft()
