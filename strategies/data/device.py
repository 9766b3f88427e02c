"""Copies batches to the device before the loop gets them: pinned, non-blocking, one batch ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device


class DeviceFeed:
    """Iterates (batch, position) pairs with the batches on the device.

    With ``ahead``, the next batch is fetched and copied on a stream of its own before the loop gets
    the current one. The position travels with its batch, so that the batch ahead does not count.
    """

    def __init__(self, pairs: Iterator[tuple[Any, Any]], device: torch.device, ahead: bool) -> None:
        self.pairs = pairs
        self.device = device
        self.stream = torch.cuda.Stream(device) if ahead and device.type == "cuda" else None
        self._next_pair: tuple[Any, Any] | None = None
        self._pending_error: BaseException | None = None

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self

    def __next__(self) -> tuple[Any, Any]:
        if self.stream is None:
            batch, position = next(self.pairs)
            return move_data_to_device(batch, self.device), position
        if self._next_pair is None:
            self._fetch_next()
        if self._next_pair is None:
            error, self._pending_error = self._pending_error, StopIteration()
            raise error if error is not None else StopIteration
        pair, self._next_pair = self._next_pair, None
        compute = torch.cuda.current_stream(self.device)
        # hazard: the compute stream must not read the batch before its copy is done.
        compute.wait_stream(self.stream)
        # hazard: the batches' memory belongs to the copy stream. When the loop frees one that the
        # compute stream still reads, the next copy may overwrite it, so it waits for what the
        # compute stream has to do by now. The step with this batch comes after that.
        self.stream.wait_stream(compute)
        self._fetch_next()
        return pair

    def _fetch_next(self) -> None:
        """Fetch and copy one batch, and keep an error until the loop has the batch before it."""
        if self._pending_error is not None:
            return
        try:
            batch, position = next(self.pairs)
        except BaseException as error:  # the next call of __next__ raises it
            self._pending_error = error
            return
        with torch.cuda.stream(self.stream):
            self._next_pair = (move_data_to_device(batch, self.device), position)
