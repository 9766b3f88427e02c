"""From full gradients on every rank to summed gradient shards.

Each gradient is copied into the unit's range of the reduce buffer as soon as autograd has made it,
and dropped. When the unit's turn in backward is over, the range is reduce-scattered and this rank's
part of the mean is added to its gradients. The range has the same size on every rank: what a
rank did not use is zero there.

Units that are not reduced at the same time share memory. With ``once`` each has its own, and what
several backward passes put there stays until it is asked for: one reduction for all of them, at the
price of a full-size fp32 gradient on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress

import torch
from torch import Tensor

from ..collectives import LocalCollectives, Work, narrow
from ..support import profile_range
from .chunk import Chunk
from .layout import RegionLayout, overlap
from .offload import HostChunk
from .streams import Stream
from .unit import Exchange, Unit


def _dtype(chunk: Chunk) -> torch.dtype:
    """Gradients are summed in fp32, or in the parameters' own dtype if that is wider or complex."""
    own = chunk.master_dtype
    return own if own in (torch.float64, torch.complex64, torch.complex128) else torch.float32


def _nbytes(unit: Unit) -> int:
    return sum(
        chunk.layout.numel * _dtype(chunk).itemsize for chunk in unit.chunks if chunk.trained
    )


def reduce_layout(trained: Sequence[Unit], once: bool, on_device: bool) -> RegionLayout:
    """Where the gradients of the ``trained`` units lie in the reduce buffer.

    The last region is the scratch where gradients that live in host memory are added up, of one
    chunk at a time. On a device a unit's reduction overlaps the next unit's backward.
    """
    sizes, separate = [_nbytes(u) for u in trained], [once or u.nested for u in trained]
    hosted = [c for u in trained for c in u.chunks if c.trained and isinstance(c, HostChunk)]
    scratch = max((c.layout.shard_numel * c.master_dtype.itemsize for c in hosted), default=0)
    return RegionLayout.build([*sizes, scratch], [*separate, True], ends=2 if on_device else 1)


class _Range:
    """A unit's part of the reduce buffer."""

    def __init__(self, unit: Unit, buffer: Tensor, region: range) -> None:
        self.unit, self.region = unit, region
        memory = buffer[region.start : region.start + _nbytes(unit)]
        self.chunks: list[tuple[Chunk, Tensor]] = []
        self.views: list[Tensor] = []  # of each trained parameter
        self.gaps: list[Tensor] = []
        for chunk in (chunk for chunk in unit.chunks if chunk.trained):
            nbytes = chunk.layout.numel * _dtype(chunk).itemsize
            part, memory = memory[:nbytes].view(_dtype(chunk)), memory[nbytes:]
            self.chunks.append((chunk, part))
            self.views += chunk.views(part)
            self.gaps += [part[a:b] for a, b in chunk.layout.gaps()]
        self.pending: list[Work] = []  # in flight
        self.hosted = [chunk for chunk, _ in self.chunks if isinstance(chunk, HostChunk)]
        self.dropped = False  # what is in flight is not wanted any more
        self.reduce_range = profile_range("reduce", unit.name)
        self.wait_range = profile_range("wait for sums", unit.name)


class Reducer:
    """Owns the reduce buffer and everything in flight out of it, in ``stream``.

    Args:
        once: room for the gradients of all units, so that they can be held.
        wire_dtype: that fp32 gradients travel in; their own if None. Sums are in fp32 all the same.
    """

    # by number of the parameter: where its gradient goes, of the parameter's shape
    views: list[Tensor]
    # by number of the parameter: there is a gradient already where the next one goes
    written: bytearray
    # by index of the unit: the memory of its range is its own, until its gradients are sent
    claimed: bytearray
    once = False
    holding = False  # the backward that runs, or comes, does not reduce
    held = False  # gradients of earlier ones wait in the buffer, on all ranks alike
    # looks at a unit's gradients before they are sent
    inspect: Callable[[Unit, Tensor], None] | None = None

    def __init__(
        self,
        units: list[Unit],
        collectives: LocalCollectives,
        stream: Stream,
        device: torch.device,
        once: bool,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._collectives, self._stream, self._wire_dtype = collectives, stream, wire_dtype
        self._scale = 1.0 / (collectives.world_size * collectives.replicas)
        self.once = once
        trained = [u for u in units if u.trained]
        layout = reduce_layout(trained, once, stream.on_device)
        self.buffer = collectives.allocate(layout.nbytes, device)
        *regions, scratch = layout.regions
        # one chunk after another has it: in the stream's work alone, which runs in order
        self._scratch = self.buffer[scratch.start : scratch.stop]
        self._ranges = {
            u.index: _Range(u, self.buffer, r) for u, r in zip(trained, regions, strict=True)
        }
        self.views = [view for place in self._ranges.values() for view in place.views]
        self.written, self.claimed = bytearray(len(self.views)), bytearray(len(units))
        self._flying: _Range | None = None
        self._mark: torch.cuda.Event | None = None

    def claim(self, index: int) -> None:
        """Free the range of the unit with this index for its gradients; collective if others are
        reduced for it.
        """
        place = self._ranges[index]
        for number in [*compress(range(len(self.claimed)), self.claimed)]:
            other = self._ranges[number]  # in an order that is alike on all ranks
            if overlap(other.region, place.region):
                self.reduce(other.unit)
        if self._flying is not None and overlap(self._flying.region, place.region):
            self.finish()  # hazard: overwriting gradients that are being sent
        self.claimed[index] = 1

    def reduce(self, unit: Unit) -> None:
        """Send the unit's gradients, zeros for those that this rank does not have; collective."""
        place = self._ranges.get(unit.index)
        if place is None or self.holding:
            return
        if not self.claimed[unit.index]:
            self.claim(unit.index)
        if self._flying is not None:
            self.finish()
        for entry, view in zip(unit.trained, place.views, strict=True):
            if not self.written[entry.number]:
                view.zero_()
            self.written[entry.number] = 0
        for gap in place.gaps:
            gap.zero_()
        with place.reduce_range:
            if self._stream.on_device:
                targets = [*map(HostChunk.room_for_gradients, place.hosted)]
                self._mark = self._stream.run(partial(self._send_and_add, place), host=targets)
                for chunk in place.hosted:
                    chunk.stored = self._mark
            else:
                self._send(place)
        self.claimed[unit.index], self._flying = 0, place

    def _send_and_add(self, place: _Range) -> None:
        self._send(place)
        self._accumulate(place)

    def _send(self, place: _Range) -> None:
        label = place.unit.labels[Exchange.REDUCE]
        for _, part in place.chunks:
            if self.inspect is not None:
                self.inspect(place.unit, part)
            if self._wire_dtype is None or part.dtype != torch.float32:
                work = self._collectives.reduce_scatter(part, label)
            else:
                work = self._collectives.reduce_scatter_in(
                    self._wire_dtype, part, self._stream.room, label
                )
            place.pending.append(work)

    def finish(self) -> None:
        """Wait for what is in flight and add it to the gradients."""
        place, self._flying = self._flying, None
        if place is not None:
            with place.wait_range:
                self._accumulate(place)
            if self._stream.on_device:
                # hazard: the buffer's next gradients, or the optimizer, before the sum is there
                self._stream.join(self._mark)

    def _accumulate(self, place: _Range) -> None:
        scale = self._scale
        pending, place.pending = place.pending, []
        dropped, place.dropped = place.dropped, False
        for (chunk, _), work in zip(place.chunks, pending, strict=False):
            total = work.wait()  # [shard]
            if dropped:
                continue
            if isinstance(chunk, HostChunk):
                target = chunk.load_gradients(self._scratch)
            else:
                gradients = chunk.gradients
                target = chunk.room_for_gradients() if gradients is None else gradients
            first, chunk.has_sums = not chunk.has_sums, True
            if target.dtype != total.dtype:
                total.mul_(scale)
                if first:
                    target.copy_(total)
                else:
                    target.add_(narrow(total, target.dtype, self._stream.room))
            elif first:
                torch.mul(total, scale, out=target)
            else:
                target.add_(total, alpha=scale)
            if isinstance(chunk, HostChunk):
                chunk.store_gradients(target)

    def abandon(self) -> None:
        """After an exception: forget gradients that were not sent, and those that are on their
        way.
        """
        if self._flying is not None:
            self._flying.dropped = True  # not awaited here: the other ranks may never send
            if self._stream.on_device:
                # hazard: on a device its sum is on the way into gradients that are cleared next
                self._stream.join(self._mark)
        self.held = False
        self.claimed[:] = bytes(len(self.claimed))
        self.written[:] = bytes(len(self.written))
