"""Copies batches to the device before the loop gets them: pinned, non-blocking, one batch ahead."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(
    batch: Any, fn: Callable[[torch.Tensor], torch.Tensor], other_fn: Callable[[Any], Any]
) -> Any:
    """Apply ``fn`` to every tensor in any nesting, ``other_fn`` to objects with a ``to`` method.

    The result has new containers of the same types; leaves of other kinds are the same objects.
    """
    if isinstance(batch, torch.Tensor):
        return fn(batch)
    if callable(getattr(batch, "to", None)):
        return other_fn(batch)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(value, fn, other_fn) for key, value in batch.items()}
        return _rebuild_mapping(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, fn, other_fn) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(value, fn, other_fn) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        copied = copy.copy(batch)
        for part in dataclasses.fields(batch):
            value = map_tensors(getattr(batch, part.name), fn, other_fn)
            # A frozen dataclass refuses its own __setattr__. A new object made by the constructor
            # would run __post_init__ again.
            object.__setattr__(copied, part.name, value)
        return copied
    return batch


def _rebuild_mapping(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return items
    copied = copy.copy(batch)  # keeps a defaultdict's factory and a subclass's attributes
    if hasattr(copied, "update"):
        copied.update(items)
        return copied
    return type(batch)(items)  # type: ignore[call-arg]


def move_batch(batch: Any, device: torch.device) -> Any:
    """Copy the batch to ``device``; the host does not wait for copies from pinned memory."""

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return map_tensors(batch, to_device, lambda obj: obj.to(device))


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
            return move_batch(batch, self.device), position
        if self._next_pair is None:
            self._fetch_next()
        if self._next_pair is None:
            error, self._pending_error = self._pending_error, StopIteration()
            raise error if error is not None else StopIteration
        batch, position = self._next_pair
        self._hand_to_compute_stream(batch)
        self._next_pair = None
        self._fetch_next()
        return batch, position

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
            self._next_pair = (move_batch(batch, self.device), position)

    def _hand_to_compute_stream(self, batch: Any) -> None:
        """Order the compute stream after the copies of the batch."""
        assert self.stream is not None
        compute = torch.cuda.current_stream(self.device)
        # hazard: the compute stream must not read the batch before its copy is done.
        compute.wait_stream(self.stream)

        def record_tensor(tensor: torch.Tensor) -> torch.Tensor:
            # hazard: the memory belongs to the copy stream. If it were freed while the compute
            # stream still reads the batch, the copy of a later batch would overwrite it.
            # `record_stream` delays the reuse.
            if tensor.is_cuda:
                tensor.record_stream(compute)
            return tensor

        def record_object(obj: Any) -> Any:
            if callable(getattr(obj, "record_stream", None)):
                obj.record_stream(compute)
                return obj
            parts = obj if isinstance(obj, Mapping) else getattr(obj, "__dict__", {})
            for part in parts.values():
                map_tensors(part, record_tensor, lambda leaf: leaf)
            return obj

        map_tensors(batch, record_tensor, record_object)
