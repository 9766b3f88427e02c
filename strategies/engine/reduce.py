"""From full gradients on every rank to summed gradient shards.

Each gradient is copied into the unit's range of the reduce buffer as soon as autograd has made it, and dropped. When the
unit's turn in backward is over, the range is reduce-scattered and this rank's part of the mean is added to the flat
gradients. The range has the same size on every rank: what a rank did not use is zero there.

Units that are not reduced at the same time share memory. With ``once`` each has its own, and what several backward passes put
there stays until it is asked for: one reduction for all of them, at the price of a full-size fp32 gradient on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ..collectives import LocalCollectives, Pending
from .chunk import Chunk, Entry
from .layout import ArenaLayout, overlap
from .resting import get_grad, set_grad
from .streams import Lane
from .unit import Exchange, Unit


def reduce_dtype(dtype: torch.dtype) -> torch.dtype:
    """Gradients are summed in fp32, or in the parameters' own dtype if that is wider or complex."""
    return dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32


class Pass(Protocol):
    """What gradients find when they arrive; see :class:`~.backward.Backward`."""

    active: bool
    muted: frozenset[int]
    used: bytearray

    def begin(self) -> None:
        """Called with the first one, unless ``active``."""


class _Range:
    """A unit's part of the reduce buffer."""

    def __init__(self, unit: Unit, buffer: Tensor, region: range) -> None:
        self.unit, self.region = unit, region
        offset = region.start
        self.chunks: list[tuple[Chunk, Tensor]] = []
        self.views: list[Tensor] = []  # of each trained parameter
        self.gaps: list[Tensor] = []
        for chunk in unit.chunks:
            if not chunk.trained:
                continue
            dtype = reduce_dtype(chunk.master_dtype)
            nbytes = chunk.layout.numel * dtype.itemsize
            part = buffer[offset : offset + nbytes].view(dtype)
            offset += nbytes
            self.chunks.append((chunk, part))
            self.views += chunk.views(part)
            self.gaps += [part[a:b] for a, b in chunk.layout.gaps()]
        self.written = [False] * len(self.views)
        self.open = False  # holds gradients that have not been sent
        self.pending: list[Pending] = []  # in flight
        self.dropped = False  # what is in flight is not wanted any more

    @staticmethod
    def nbytes(unit: Unit) -> int:
        return sum(c.layout.numel * reduce_dtype(c.master_dtype).itemsize for c in unit.chunks if c.trained)


class Reducer:
    """Owns the reduce buffer and everything in flight out of it.

    Args:
        lane: where the exchange runs.
        once: room for the gradients of all units, so that they can be held.
        wire_dtype: that fp32 gradients travel in; their own if None. Sums are in fp32 all the same.

    Attributes:
        once: they can.
        holding: the backward that runs, or comes, does not reduce.
        held: nor did earlier ones; on all ranks alike.
        lasting: cleared gradients keep their memory, because somebody has its address, or because a device's caching allocator
            might have cut it up when it is wanted again.
        inspect: looks at a unit's gradients before they are sent.
    """

    once = holding = held = False
    inspect: Callable[[Unit, Tensor], None] | None = None

    def __init__(
        self,
        units: list[Unit],
        collectives: LocalCollectives,
        lane: Lane,
        device: torch.device,
        once: bool,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._collectives, self._lane, self._wire_dtype = collectives, lane, wire_dtype
        self.once, self.lasting = once, device.type != "cpu"
        trained = [u for u in units if u.trained]
        ends = 2 if lane.on_device else 1  # 2: a unit's reduction overlaps the next unit's backward
        layout = ArenaLayout.build([_Range.nbytes(u) for u in trained], [once or u.nested for u in trained], ends=ends)
        self.buffer = collectives.allocate(layout.nbytes, device)
        self._ranges = {u.index: _Range(u, self.buffer, r) for u, r in zip(trained, layout.regions, strict=True)}
        self._open: list[_Range] = []
        self._flying: _Range | None = None
        self._mark: torch.cuda.Event | None = None

    def collector(self, unit: Unit, index: int, now: Pass) -> Callable[[Tensor], None]:
        """The hook that takes the gradient of trained parameter ``index`` of ``unit`` and drops it.

        One function, because it runs for each parameter in each backward. Its references are weak: torch keeps the hooks of
        a parameter where the garbage collector cannot look, so the model would never be freed.
        """
        place, number = self._ranges[unit.index], unit.trained[index].number
        view, written, used = place.views[index], place.written, now.used
        get_reducer, get_place, get_now = weakref.ref(self), weakref.ref(place), weakref.ref(now)
        del place, now

        def collect(parameter: Tensor) -> None:
            with torch._C.DisableTorchFunctionSubclass():  # of a resting parameter, too
                grad = get_grad(parameter)
                set_grad(parameter, None)
            now, place = get_now(), get_place()
            if not now.active:
                now.begin()
            if grad is None or (now.muted and number in now.muted):  # a custom Function may return None
                return
            used[number] = 1
            if not place.open:
                get_reducer()._claim(place)
            if grad.is_sparse:
                grad = grad.to_dense()
            if written[index]:
                view.add_(grad.detach())  # with create_graph a gradient has a graph of its own
            else:
                view.copy_(grad.detach())
                written[index] = True

        return collect

    def _claim(self, place: _Range) -> None:
        for other in sorted(self._open, key=lambda opened: opened.unit.index):  # alike on all ranks
            if overlap(other.region, place.region):
                self.reduce(other.unit)
        if self._flying is not None and overlap(self._flying.region, place.region):
            self.finish()  # hazard: overwriting gradients that are being sent
        place.open = True
        self._open.append(place)

    def is_open(self, unit: Unit) -> bool:
        """Whether gradients of ``unit`` wait to be reduced now."""
        place = self._ranges.get(unit.index)
        return place is not None and place.open and not self.holding

    def reduce(self, unit: Unit) -> None:
        """Send the unit's gradients, zeros for those that this rank does not have; collective."""
        place = self._ranges.get(unit.index)
        if place is None or self.holding:
            return
        if not place.open:
            self._claim(place)
        self.finish()
        if unit.announce is not None:
            unit.announce(unit, Exchange.REDUCE)
        for view, written in zip(place.views, place.written, strict=True):
            if not written:
                view.zero_()
        for gap in place.gaps:
            gap.zero_()
        place.written[:] = [False] * len(place.views)
        with self._lane.fork():
            for _, part in place.chunks:
                if self.inspect is not None:
                    self.inspect(unit, part)
                label = unit.labels[Exchange.REDUCE]
                if self._wire_dtype is None or part.dtype != torch.float32:
                    place.pending.append(self._collectives.reduce_scatter(part, label))
                else:
                    place.pending.append(self._collectives.reduce_scatter_in(self._wire_dtype, part, label))
            if self._lane.on_device:
                self._accumulate(place)
            self._mark = self._lane.mark()
        place.open, self._flying = False, place
        self._open.remove(place)
        if unit.announce is not None:
            self.finish()  # ranks that assist do so at once, and may wait until all have their sums

    def finish(self) -> None:
        """Wait for what is in flight and add it to the flat gradients."""
        place, self._flying = self._flying, None
        if place is not None:
            self._accumulate(place)
            self._lane.join(self._mark)  # hazard: the buffer's next gradients, or the optimizer, before the sum is there

    def _accumulate(self, place: _Range) -> None:
        scale = 1.0 / (self._collectives.world_size * self._collectives.replicas)
        pending, place.pending = place.pending, []
        dropped, place.dropped = place.dropped, False
        for (chunk, _), work in zip(place.chunks, pending, strict=False):
            total = work.wait()  # [shard]
            if dropped:
                continue
            for piece in chunk.owned:
                target, part = piece.group.grad[piece.place], total[piece.inside]
                first = piece.is_first_in_window()
                if target.dtype != part.dtype:
                    part.mul_(scale)
                    target.copy_(part) if first else target.add_(part.to(target.dtype))
                elif first:
                    torch.mul(part, scale, out=target)
                else:
                    target.add_(part, alpha=scale)

    def zero_untouched(self) -> None:
        """Gradients of units that no backward reached since they were cleared are zero, not what they were."""
        for place in self._ranges.values():
            for chunk, _ in place.chunks:
                for piece in chunk.owned:
                    if piece.is_first_in_window():
                        piece.group.grad[piece.place].zero_()

    def drop(self, first: int, last: int) -> None:
        """Gradients of the parameters numbered [first, last) were cleared: forget what is held of them."""
        for place in self._open:
            for index, entry in enumerate(place.unit.trained):
                if first <= entry.number < last:
                    place.written[index] = False

    def show(self, shown: bytes) -> None:
        """Gradients are complete. A resting parameter's ``grad`` reads them from the shards, see access.py."""

    def hide(self) -> None:
        """The gradients that were shown are over."""

    def changed(self) -> list[tuple[Entry, Tensor | None]]:
        """Gradients that the user replaced since they were shown."""
        return []

    def abandon(self) -> None:
        """After an exception: forget gradients that were not sent, and those that are on their way."""
        if self._flying is not None:
            self._flying.dropped = True  # not awaited here: the other ranks may never send
        self.held = False
        for place in self._open:
            place.open = False
            place.written[:] = [False] * len(place.views)
        self._open = []
