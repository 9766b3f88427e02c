"""One unit: its chunks, the buffer that they are unsharded into, and the phases of its life."""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..collectives import LocalCollectives, Work
from ..support import profile_range
from ..support.torch_internals import (
    DisableFuncTorch,
    DisableTorchFunctionSubclass,
    dispatch_modes,
    use_count,
)
from .chunk import Chunk, Entry
from .isolation import isolated
from .layout import RegionLayout
from .partition import UnitModules
from .sharded import ResidencyError, ShardedParameter, absent_like, class_in_use, set_data
from .streams import Stream

_inference = torch.is_inference_mode_enabled  # a C function: each unshard asks


_STORAGES: set[int] = set()  # of all buffers


def is_in_buffer(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a view of an unsharded parameter, or of all of its unit."""
    with DisableTorchFunctionSubclass():
        return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in _STORAGES


class Phase(enum.Enum):
    """Where the full values of a unit are."""

    SHARDED = "sharded"  # nowhere: only the shards exist
    UNSHARDING = "unsharding"  # on their way into the buffer
    UNSHARDED = "unsharded"  # in the buffer, which another unit may take unless it is pinned


class Exchange(enum.IntEnum):
    """What is exchanged of a unit."""

    UNSHARD = 0  # its values, into its buffer
    VALUES = 1  # the master values (or optimizer state), into memory of their own
    GRADIENTS = 2  # reduced gradients, into memory of their own
    REDUCE = 3  # gradients, which are summed
    STATE = 4  # the optimizer state of a parameter, which all ranks are about to read


@dataclass(eq=False)
class BufferPool:
    """The memory of all units' own buffers, and who has it."""

    memory: Tensor  # [bytes]
    # whose values are in their buffers, or come; few
    holders: list[Unit] = field(default_factory=list)
    # those among them whose memory no other unit may take
    in_use: list[Unit] = field(default_factory=list)
    # whose memory somebody held when their use ended (a view of a weight, an array, autograd), or
    # may hold: what backward was given out of its turn
    kept: dict[Unit, None] = field(default_factory=dict)
    # graphs are captured, or will be: they hold memory of units that share it, and know that
    is_captured: bool = False
    # tells ranks what is exchanged, in a step that not all run: gradients of parameters, which
    # would be a mean over some ranks, are dropped in it
    announce: Callable[[Unit, Exchange], None] | None = None

    def store_written(self) -> None:
        """What the user wrote to parameters in use becomes known."""
        for unit in tuple(self.in_use):
            unit.store_written()


class Buffer:
    """Memory that a unit is unsharded into.

    It has a storage of its own, for which torch counts the tensors that share it: who holds some is
    found, wherever it was made.
    """

    def __init__(self, unit: Unit, memory: Tensor, rank: int) -> None:
        """``memory`` [bytes] is large enough for the chunks of ``unit``."""
        self.memory = torch.from_dlpack(memory)
        self._storage = self.memory.untyped_storage()
        self.storage = self._storage._cdata  # its identity
        _STORAGES.add(self.storage)
        weakref.finalize(self, _STORAGES.discard, self.storage)
        self.start = self.memory.data_ptr()
        self.parts: list[Tensor] = []  # of each chunk: [numel], in the dtype of computation
        self.sent: list[Tensor] = []  # of each chunk: what travels, as bytes
        self.fills: list[tuple[Tensor, Tensor]] = []  # (part of the buffer, its shard)
        self.views: list[tuple[Entry, Tensor]] = []
        self._lay_out(unit, rank)
        self.typed = {part.dtype: self.memory.view(part.dtype) for part in self.parts}
        self.usual = use_count(self.storage)

    def _lay_out(self, unit: Unit, rank: int) -> None:
        offset = 0
        for chunk in unit.chunks:
            part = self.memory[offset : offset + chunk.nbytes].view(chunk.dtype)
            shard = chunk.shard_of(part, rank)
            self.parts.append(part)
            self.sent.append(part.view(torch.uint8))
            # `.data` counts its own versions: what autograd has saved is not changed by the same
            # values that are unsharded again
            self.fills.append((shard.data, chunk.source))
            self.views += zip(chunk.entries, chunk.views(part), strict=True)
            offset += chunk.nbytes

    def is_held(self) -> bool:
        """Whether others than the engine have tensors in it, while the parameters have not."""
        return use_count(self.storage) > self.usual


class Unit:
    """Parameters that are unsharded, used and resharded together."""

    phase: Phase
    rivals: Set[Unit]  # other units whose own buffers share memory with its own
    buffer: Buffer  # that it is unsharded into now, or will be
    pins: int  # uses that have not ended
    # parameters hold values of their own (`gathered`): there is nothing to unshard for a forward
    has_own_values: bool
    # name -> full value, while a transform of torch.func runs a forward; {}: written since
    full_values: dict[str, Tensor] | None = None

    def __init__(self, index: int, modules: UnitModules, chunks: list[Chunk]) -> None:
        self.index, self.chunks = index, chunks
        self.name, self.members = modules.name, modules.members
        self.nested = modules.nested
        self.hosted: list[Any] = []  # those among them in host memory, :class:`HostChunk`
        self.entries = [e for chunk in chunks for e in chunk.entries]
        for entry in self.entries:
            entry.unit, entry.cls_in_use = self, class_in_use(entry.cls)
        self.trained = [e for e in self.entries if e.trained]
        self.nbytes = sum(chunk.nbytes for chunk in chunks)  # of the buffer
        # name exchanges to other ranks
        self.labels = tuple(index * len(Exchange) + exchange for exchange in Exchange)
        self.phase, self.pins, self.has_own_values = Phase.SHARDED, 0, False
        self._unshard_range = profile_range("unshard", self.name)
        self._wait_range = profile_range("wait", self.name)
        self._pending: list[Work] = []
        self._filled: torch.cuda.Event | None = None  # where the stream has filled the buffer
        self._beside: Buffer | None = None  # another one, because its own is held on this rank

    def connect(
        self, collectives: LocalCollectives, stream: Stream, pool: BufferPool, start: int
    ) -> None:
        """Take the buffer at ``start`` [bytes of the pool], and leave the parameters without
        memory.
        """
        self._collectives, self._stream, self.pool = collectives, stream, pool
        memory = pool.memory[start : start + self.nbytes]
        self.home = self.buffer = Buffer(self, memory, collectives.rank)
        # (device type, dtype) that some of its weights are rounded to, as autocast would
        device = pool.memory.device.type
        lower = {c.dtype for c in self.chunks if c.dtype != c.master_dtype}
        self.rounded = (device, lower.pop()) if lower else None
        for entry in self.entries:
            entry.absent = absent_like(entry.meta, entry.chunk.dtype, pool.memory.device)
            entry.parameter.data = entry.absent
            entry.seen = entry.parameter._version
        # where `entries` begin [bytes of the buffer]
        self.starts = [view.storage_offset() * view.itemsize for _, view in self.home.views]
        self.shard_parameters()

    def shard_parameters(self) -> None:
        """From now on every operation on the parameters is answered by
        :class:`ShardedParameter`.
        """
        for entry in self.entries:
            entry.parameter.__class__ = entry.cls_in_use
            set_data(entry.parameter, entry.absent)
            entry.parameter.__class__ = ShardedParameter

    def unshard(self, ahead: bool = False) -> None:
        """Start filling the buffer unless it is filled.

        ``ahead``: of its use, while another unit runs; nothing happens if that has the memory.
        """
        if not ahead:
            # before anything that may wait for other ranks
            self._collectives.exchange_log.progress[0] = self.index
        if self.phase is not Phase.SHARDED or self.has_own_values:
            return
        pool = self.pool
        if not self.rivals.isdisjoint(pool.in_use):
            if ahead:
                return
            self.buffer = self._spare()  # on all ranks
        for other in tuple(pool.holders):
            if other in self.rivals:
                other.reshard()
        # on this rank, perhaps
        is_kept = (
            bool(pool.kept)
            and self.buffer is self.home
            and not pool.is_captured
            and self._is_kept_from()
        )
        self._beside = self._spare() if is_kept else None
        pool.holders.append(self)
        with self._unshard_range:
            self._fill()
        if pool.announce:
            # ranks that assist do so at once, and may wait until all have what they gave
            self.wait()

    def _fill(self) -> None:
        """Start filling the buffer; or fill another one by way of it, if somebody on this rank
        holds some of its memory.

        The exchange is in the same memory on all ranks: they may read each other's. Then what is
        held is put back.
        """
        if self._beside is not None:
            with isolated():
                before, self.buffer = self.home.memory.clone(), self.home
        if self.pool.announce:
            self.pool.announce(self, Exchange.UNSHARD)
        # No torch.func transform is to see it.
        with isolated() if dispatch_modes() or _inference() else DisableFuncTorch():
            for chunk in self.hosted:
                chunk.begin_load()
            if self._stream.on_device:
                self._filled = self._stream.run(self._send, [self.buffer.memory])
            else:
                self._send()
            for chunk in self.hosted:
                chunk.end_load(self._filled)
        self.phase = Phase.UNSHARDING
        if self._beside is not None:
            self.wait()
            self.buffer = self._beside
            with isolated():
                self.buffer.memory.copy_(self.home.memory)
                self.home.memory.copy_(before)

    def _is_kept_from(self) -> bool:
        """Whether somebody holds what another unit has left in the memory."""
        kept = {unit: None for unit in self.pool.kept if unit.home.is_held() or unit.pins}
        self.pool.kept = kept
        return not self.rivals.isdisjoint(kept)

    def _spare(self) -> Buffer:
        """Memory for this once: its own is another unit's, or holds what somebody still has."""
        with isolated():
            memory = self.pool.memory.new_empty(self.nbytes)
            return Buffer(self, memory, self._collectives.rank)

    def _send(self) -> None:
        for chunk in self.hosted:
            chunk.load()
        for target, source in self.buffer.fills:
            target.copy_(source, non_blocking=True)
        for sent in self.buffer.sent:
            self._pending.append(self._collectives.all_gather(sent, self.labels[Exchange.UNSHARD]))

    def wait(self) -> None:
        """Wait until the buffer is filled."""
        if self.phase is Phase.UNSHARDING:
            if self._stream.on_device:
                # hazard: computing with weights that are still arriving
                self._stream.join(self._filled)
            # As in `_fill`: on the CPU it is now that shards are copied.
            with isolated() if dispatch_modes() or _inference() else DisableFuncTorch():
                for pending in self._pending:
                    pending.wait()
            self._pending = []
            self.phase = Phase.UNSHARDED

    def use(self) -> None:
        """The parameters are ordinary and full from here to the matching :meth:`unuse`."""
        self._collectives.exchange_log.progress[0] = self.index
        if self.has_own_values:
            self.require_free()
        if self.phase is Phase.SHARDED:
            self.unshard()
        if self.phase is Phase.UNSHARDING:
            with self._wait_range:
                self.wait()
        if not self.pins:
            for entry, view in self.buffer.views:
                parameter = entry.parameter
                parameter.__class__ = entry.cls_in_use
                if parameter._version != entry.seen:
                    self.shard_parameters()  # also those before it
                    raise _written_while_sharded(entry)
                set_data(parameter, view)
            self.pool.in_use.append(self)
        self.pins += 1

    def unuse(self) -> None:
        """End of one use. The values stay in the buffer until another unit takes it."""
        self.pins -= 1
        if self.pins > 0:
            return
        self.pool.in_use.remove(self)
        written = False
        for entry in self.entries:
            parameter = entry.parameter
            written |= parameter._version != entry.seen
            if entry.aliases:  # `.data`
                if entry.was_written():
                    entry.seen, written = -1, True
                entry.aliases = []
            set_data(parameter, entry.absent)
            parameter.__class__ = ShardedParameter
        if self.buffer.is_held():
            self.pool.kept[self] = None
        if written:
            try:
                self.store_written()
            except ResidencyError:
                self.reshard()  # what cannot be stored is not computed with either
                raise

    def store_written(self) -> None:
        """Parameters that were changed in place during this use: the shards get the values, which
        the ranks compare later.
        """
        for chunk, part in zip(self.chunks, self.buffer.parts, strict=True):
            for entry, offset in zip(chunk.entries, chunk.layout.offsets, strict=True):
                if entry.parameter._version == entry.seen:
                    continue
                entry.seen = entry.parameter._version
                if chunk.dtype != chunk.master_dtype:
                    raise ResidencyError(
                        f"Parameter {entry.name!r} was changed in place while it is unsharded in"
                        f" {chunk.dtype}. That would round its {chunk.master_dtype} value."
                        " Change it outside of its layer's forward, under `torch.no_grad()`."
                    )
                values = part[offset : offset + entry.size.numel()]
                self._collectives.exchange_log.record_write(entry.name, "written", values)
                mine = entry.part_of(chunk.shard_of(part, self._collectives.rank))
                with torch.no_grad():
                    entry.part_of(chunk.values).copy_(mine)

    def require_free(self) -> None:
        """Raise if the parameters are in use, or hold values of their own."""
        if self.pins or self.has_own_values:
            raise ResidencyError(
                f"The parameters of unit {self.name} have values of their own inside of `gathered`,"
                " or are in a forward that uses them: they cannot be gathered once more, stepped by"
                " an optimizer, or needed by the backward of another forward. Do both inside, or"
                " both outside."
            )

    def reshard(self) -> None:
        """Give the buffer up, unless it is in use."""
        if self.phase is Phase.UNSHARDING:
            self.wait()  # hazard: the memory's next owner while ranks still send into it
        if self.phase is Phase.UNSHARDED and not self.pins:
            self.phase = Phase.SHARDED
            self.pool.holders.remove(self)
            self.buffer, self._beside = self.home, None

    def refresh(self) -> None:
        """Some shards changed: what is in the buffer is no longer true."""
        if self.pins:
            self._fill()
            self.wait()
        else:
            self.reshard()

    def abandon(self) -> None:
        """After an exception: no use is left, however many were open."""
        incomplete = self.phase is Phase.UNSHARDING
        self.phase, self.pins = Phase.UNSHARDED, 1
        try:
            self.unuse()
        finally:
            if incomplete:
                self._pending = []
                self.reshard()

    def full(
        self,
        shard_of: Callable[[Chunk], Tensor | None],
        what: Exchange = Exchange.VALUES,
    ) -> dict[str, Tensor]:
        """Name -> full tensor of what ``shard_of`` says this rank has of each chunk (None: zeros),
        laid out like its values; collective.
        """
        result: dict[str, Tensor] = {}
        for chunk in self.chunks:
            with isolated():
                source = shard_of(chunk)
                buffer = torch.empty(
                    chunk.layout.numel,
                    dtype=chunk.master_dtype if source is None else source.dtype,
                    device=chunk.device,
                )
                mine = chunk.shard_of(buffer, self._collectives.rank)
                mine.zero_() if source is None else mine.copy_(source)
                self._collectives.all_gather(buffer.view(torch.uint8), self.labels[what]).wait()
            result.update(zip([e.name for e in chunk.entries], chunk.views(buffer), strict=True))
        return result

    def values(self) -> dict[str, Tensor]:
        """Name -> full master value, in memory of its own; collective."""
        if self.pool.announce:
            self.pool.announce(self, Exchange.VALUES)
        return self.full(Chunk.read)

    def gradients(self) -> dict[str, Tensor]:
        """Name -> full reduced gradient, or anything where there is none; collective."""
        return self.full(
            lambda chunk: chunk.gradients if chunk.has_sums else None, Exchange.GRADIENTS
        )

    def whole(self, entry: Entry, part: Tensor) -> Tensor:
        """A tensor of the shape of ``entry``, of which ``part`` has this rank's elements;
        collective.
        """
        if not entry.size.numel():
            return part.new_empty(entry.size)
        with isolated():
            full = torch.zeros(entry.size.numel(), dtype=part.dtype, device=entry.chunk.device)
            if entry.span is not None:
                full[entry.span.start : entry.span.stop] = part
            self._collectives.all_reduce(full.view(torch.uint8))  # each byte is one rank's, or 0
            return entry.view(full, 0)


class WholeUnit(Unit):
    """A unit on a single rank: its shard is the whole.

    Parameters view it, as ordinary parameters, and nothing ever moves.
    """

    def connect(
        self, collectives: LocalCollectives, stream: Stream, pool: BufferPool, start: int
    ) -> None:
        """See :meth:`Unit.connect`."""
        self._collectives, self.pool = collectives, pool
        for entry in self.entries:
            entry.aliases = deque(maxlen=0)  # nobody needs to know what is written to `.data`
            place = entry.chunk.layout.offsets[entry.chunk.entries.index(entry)]
            entry.parameter.data = entry.view(entry.chunk.values, place)
            entry.parameter.__class__ = entry.cls_in_use
        self.phase, self.pins = Phase.UNSHARDED, 1  # in use for ever


def pool_layout(units: Sequence[Unit], alone: bool) -> RegionLayout:
    """Where the units' own buffers lie in the pool; on one rank there are none."""
    sizes = [0 if alone else unit.nbytes for unit in units]
    return RegionLayout.build(sizes, [unit.nested for unit in units])


def _written_while_sharded(entry: Entry) -> ResidencyError:
    return ResidencyError(
        f"Parameter {entry.name!r} was changed in place after its unit's use, through a view that"
        " was kept from its forward (`w = self.weight[0]`, `w.zero_()`): the shards did not follow."
        " Change the parameter itself, under `torch.no_grad()`."
    )
