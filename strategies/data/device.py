"""Batches on the device before they are handed over: pinned, non-blocking, one batch ahead."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(
    batch: Any, fn: Callable[[torch.Tensor], torch.Tensor], other: Callable[[Any], Any]
) -> Any:
    """Apply ``fn`` to every tensor in any nesting, ``other`` to objects with a ``to`` method.

    The containers are new ones of the same type; leaves of other kinds are the same objects.
    """
    if isinstance(batch, torch.Tensor):
        return fn(batch)
    if callable(getattr(batch, "to", None)):
        return other(batch)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(value, fn, other) for key, value in batch.items()}
        return _rebuild_mapping(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, fn, other) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, fn, other) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for part in dataclasses.fields(batch):
            # Past __setattr__: a frozen dataclass refuses it, and __post_init__ need not run again.
            object.__setattr__(moved, part.name, map_tensors(getattr(batch, part.name), fn, other))
        return moved
    return batch


def _rebuild_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return items
    moved = copy.copy(batch)  # keeps a defaultdict's factory and a subclass's attributes
    if hasattr(moved, "update"):
        moved.update(items)
        return moved
    return type(batch)(items)  # type: ignore[call-arg]


def move(batch: Any, device: torch.device) -> Any:
    """The batch on ``device``; copies from pinned memory do not wait."""

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        pinnable = device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned()
        return (tensor.pin_memory() if pinnable else tensor).to(device, non_blocking=True)

    return map_tensors(batch, to_device, lambda obj: obj.to(device))


class DeviceFeed:
    """Iterates (batch, position) pairs with the batches on the device.

    With ``ahead``, the next batch is fetched and copied on a stream of its own before the current
    one is handed over. The position travels with its batch, so what is ahead does not count.
    """

    def __init__(self, pairs: Iterator[tuple[Any, Any]], device: torch.device, ahead: bool) -> None:
        self.pairs = pairs
        self.device = device
        self.stream = torch.cuda.Stream(device) if ahead and device.type == "cuda" else None
        self._next: tuple[Any, Any] | None = None
        self._error: BaseException | None = None

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self

    def __next__(self) -> tuple[Any, Any]:
        if self.stream is None:
            batch, position = next(self.pairs)
            return move(batch, self.device), position
        if self._next is None:
            self._fetch()
        if self._next is None:
            error, self._error = self._error, StopIteration()
            raise error if error is not None else StopIteration
        batch, position = self._next
        self._hand_over(batch)
        self._next = None
        self._fetch()
        return batch, position

    def _fetch(self) -> None:
        """Fetch and copy one batch; an error waits until the batch before it was handed over."""
        if self._error is not None:
            return
        try:
            batch, position = next(self.pairs)
        except BaseException as error:  # raised by __next__, in its turn
            self._error = error
            return
        with torch.cuda.stream(self.stream):
            self._next = (move(batch, self.device), position)

    def _hand_over(self, batch: Any) -> None:
        compute = torch.cuda.current_stream(self.device)
        # Hazard: the compute stream must not read the batch before its copy is done.
        compute.wait_stream(self.stream)

        def used_by_compute(tensor: torch.Tensor) -> torch.Tensor:
            # Hazard: the block belongs to the copy stream. Freed while the compute stream still
            # reads it, it would take the next batch's copy; this delays its reuse.
            if tensor.is_cuda:
                tensor.record_stream(compute)
            return tensor

        def other_used_by_compute(obj: Any) -> Any:
            if callable(record := getattr(obj, "record_stream", None)):
                record(compute)
                return obj
            parts = (
                obj if isinstance(obj, Mapping) else vars(obj) if hasattr(obj, "__dict__") else {}
            )
            for part in parts.values():
                map_tensors(part, used_by_compute, lambda inner: inner)
            return obj

        map_tensors(batch, used_by_compute, other_used_by_compute)
