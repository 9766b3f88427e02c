"""Dispatch: rank 0 reads for all ranks and sends each rank its batches.

Per rank and batch, rank 0 sends a header of three integers [kind, bytes of the structure, bytes of
the buffer] and one buffer with all tensors of the batch. The structure around the tensors
(containers, shapes, other objects) is pickled; rank 0 sends it only when it differs from the last
one. A rank gets no other rank's batch. The messages have a process group of their own, on CPU, so
that they cannot meet the collectives of the training step.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from .base_feed import Feed, Pairs
from .device import map_tensors
from .map_feed import MapFeed

_BATCH, _END, _ERROR = 0, 1, 2
# hazard: a message whose buffer is freed before it was sent never arrives. This list keeps the
# messages of a loop that was given up or of a loader that was dropped: at most one row each.
_UNSENT_MESSAGES: list[list[Any]] = []
_ALIGN = 16  # bytes; views of every dtype start aligned


class _Slot:
    """A place holder for tensor number ``index`` in a pickled structure."""

    def __init__(self, index: int) -> None:
        self.index = index

    def to(self) -> None:
        """Mark a slot as a leaf for `map_tensors`; nobody calls this method."""


def pack(batch: Any) -> tuple[bytes, torch.Tensor]:
    """Split a batch into its structure and one flat buffer with the bytes of all its tensors."""
    tensors: list[torch.Tensor] = []

    def replace_tensor(tensor: torch.Tensor) -> Any:
        tensors.append(tensor)
        return _Slot(len(tensors) - 1)

    skeleton = map_tensors(batch, replace_tensor, lambda obj: obj)
    layout, offset = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        layout.append((tensor.dtype, tuple(tensor.shape), offset, size))
        offset += size if len(tensors) == 1 else -(-size // _ALIGN) * _ALIGN
    if len(tensors) == 1 and tensors[0].is_contiguous() and tensors[0].numel():
        return pickle.dumps((skeleton, layout)), tensors[0].reshape(-1).view(torch.uint8)  # no copy
    buffer = torch.empty(offset, dtype=torch.uint8, device="cpu")
    for tensor, (dtype, shape, begin, size) in zip(tensors, layout, strict=True):
        buffer[begin : begin + size].view(dtype).view(shape).copy_(tensor)
    return pickle.dumps((skeleton, layout)), buffer


def unpack(structure: tuple[Any, list[Any]], buffer: torch.Tensor) -> Any:
    """Rebuild a batch from the results of `pack`; its tensors are views of ``buffer``."""
    skeleton, layout = structure
    views = [
        buffer[begin : begin + size].view(dtype).view(shape) for dtype, shape, begin, size in layout
    ]
    return map_tensors(
        skeleton, lambda tensor: tensor, lambda obj: views[obj.index] if type(obj) is _Slot else obj
    )


class DispatchFeed:
    """Shares rank 0's feed out among the ranks; see `Feed`.

    Args:
        feed: on rank 0, yields the batches of all ranks, row by row and in rank order. On the other
            ranks, None for a stream; for map-style data a `MapFeed`, which only counts.
        loader: the user's loader.
        label: names rank and loader in errors.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(
        self,
        feed: Feed | None,
        loader: DataLoader,
        label: str,
        rank: int,
        world_size: int,
    ) -> None:
        self.group = dist.new_group(backend="gloo")
        self.feed = feed
        self.loader = feed.loader if feed is not None else loader
        self.label = label
        self.rank = rank
        self.world_size = world_size
        self._in_flight: list[Any] = []  # (work, tensor) of each message of the newest row
        _UNSENT_MESSAGES.append(self._in_flight)
        facts: list[Any] = (
            [(feed.row_samples, feed.batches_per_rank(), feed.describe())]
            if rank == 0 and feed is not None
            else [None]
        )
        dist.broadcast_object_list(facts, group=self.group)
        self.row_samples, self._batch_counts, self._facts = facts[0]

    def start(
        self, epoch: int, cycle: int, position: Any, is_new_epoch: bool, salt: int = 0
    ) -> Pairs:
        """See `Feed`."""
        self._finish_sending()
        if self.rank == 0:
            assert self.feed is not None
            return self._send_rows(self.feed.start(epoch, cycle, position, is_new_epoch, salt))
        if not isinstance(self.feed, MapFeed):
            return self._receive_batches(lambda count: count)
        self.feed.sampler.begin_pass(epoch, cycle, 0 if is_new_epoch else position or 0)
        return self._receive_batches(self.feed.sampler.plan().items_after)

    def _send_rows(self, pairs: Pairs) -> Pairs:
        last_structures: dict[int, bytes] = {}  # by rank
        try:
            for row in self._group_rows(pairs):
                # Rank 0 reads this row while the row before travels.
                self._finish_sending()
                for rank in range(1, self.world_size):
                    kind, batch = (_BATCH, row[rank][0]) if rank < len(row) else (_END, None)
                    self._send_batch(rank, kind, batch, last_structures)
                yield row[0][0], row[-1][1]
        except Exception as error:
            for rank in range(1, self.world_size):
                reason = f"{type(error).__name__}: {error}"
                self._send_batch(rank, _ERROR, [reason], last_structures)
            self._finish_sending()
            raise
        for rank in range(1, self.world_size):
            self._send_batch(rank, _END, None, last_structures)
        self._finish_sending()

    def _finish_sending(self) -> None:
        # hazard: a buffer must not be freed before its message was sent.
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight.clear()

    def _group_rows(self, pairs: Pairs) -> Iterator[list[tuple[Any, Any]]]:
        """Group the batches of one row; the last row may lack the batches of the last ranks."""
        row: list[tuple[Any, Any]] = []
        for pair in pairs:
            row.append(pair)
            if len(row) == self.world_size:
                yield row
                row = []
        if row:
            yield row

    def _send_batch(
        self, rank: int, kind: int, batch: Any, last_structures: dict[int, bytes]
    ) -> None:
        structure, buffer = pack(batch)
        is_new = last_structures.get(rank) != structure
        last_structures[rank] = structure
        header = torch.tensor(
            [kind, len(structure) if is_new else 0, buffer.numel()], dtype=torch.int64, device="cpu"
        )
        parts = [header]
        if is_new:
            parts.append(torch.frombuffer(bytearray(structure), dtype=torch.uint8))
        if buffer.numel():
            parts.append(buffer)
        self._in_flight += [(dist.isend(part, rank, self.group), part) for part in parts]

    def _receive_batches(self, position_after: Callable[[int], Any]) -> Pairs:
        structure: Any = None
        header = torch.empty(3, dtype=torch.int64, device="cpu")
        count = 0
        while True:
            dist.recv(header, 0, self.group)
            kind, structure_bytes, buffer_bytes = header.tolist()
            if structure_bytes:
                raw = torch.empty(structure_bytes, dtype=torch.uint8, device="cpu")
                dist.recv(raw, 0, self.group)
                structure = pickle.loads(raw.numpy().tobytes())
            buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device="cpu")
            if buffer_bytes:
                dist.recv(buffer, 0, self.group)
            if kind == _END:
                return
            if kind == _ERROR:
                raise RuntimeError(
                    f"{self.label}: rank 0, which reads for all ranks, failed: {structure[0][0]}"
                )
            count += 1
            yield unpack(structure, buffer), position_after(count)

    def batches_per_rank(self) -> list[int] | None:
        """See `Feed`."""
        if isinstance(self.feed, MapFeed):
            return self.feed.batches_per_rank()
        return self._batch_counts

    def length(self) -> int | None:
        """See `Feed`."""
        counts = self.batches_per_rank()
        return None if counts is None else counts[self.rank]

    def count_done_batches(self, position: Any) -> int | None:
        """See `Feed`."""
        return self.feed.count_done_batches(position) if isinstance(self.feed, MapFeed) else None

    def is_finished(self, position: Any) -> bool:
        """See `Feed`. A receiver of a stream notices the end only when rank 0 sends it."""
        return self.feed.is_finished(position) if self.feed is not None else False

    def describe(self) -> dict[str, Any]:
        """See `Feed`."""
        return self._facts

    def save_position(self, position: Any) -> Any:
        """See `Feed`. Only rank 0, which writes the checkpoint, knows a stream's position."""
        return self.feed.save_position(position) if self.feed is not None else None

    def load_position(self, state: Any, saved: dict[str, Any]) -> Any:
        """See `Feed`."""
        return self.feed.load_position(state, saved) if self.feed is not None else None

    def position_after_rows(self, rows: int) -> Any:
        """See `Feed`."""
        return self.feed.position_after_rows(rows) if isinstance(self.feed, MapFeed) else None

    def set_epoch(self, epoch: int) -> None:
        """See `Feed`."""
        if self.feed is not None:
            self.feed.set_epoch(epoch)

    def reseed(self, seed: int) -> None:
        """See `Feed`."""
        if self.feed is not None:
            self.feed.reseed(seed)

    def rewind(self) -> None:
        """See `Feed`."""
        if self.feed is not None:
            self.feed.rewind()

    def close(self) -> None:
        """See `Feed`."""
        if self.feed is not None:
            self.feed.close()
