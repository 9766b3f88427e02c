"""One unit: its chunks, the slot they are gathered into, and the phases of its life."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from ..collectives import LocalCollectives, Work, widen
from ..residency.apart import apart
from ..residency.given_out import Alias
from ..residency.home import ResidencyError
from ..residency.numbers import class_at_rest, hide, show
from ..residency.resting import RestingParameter
from ..support import profile_range
from .chunk import Chunk
from .lifted import Lifted
from .partition import UnitModules
from .shards import Entry, FlatGroup
from .streams import Stream

# C functions: each gather asks
_modes, _inference = (
    torch._C._len_torch_dispatch_stack,
    torch.is_inference_mode_enabled,
)
count_viewers = torch._C._storage_Use_Count  # tensors that share a storage; each use asks


class Phase(enum.Enum):
    """Where the full values of a unit are."""

    RESTING = "resting"  # nowhere: only the shards exist
    GATHERING = "gathering"  # on their way into the slot
    READY = "ready"  # in the slot, which another unit may take
    IN_USE = "in use"  # in the slot, which nobody may take


class Exchange(enum.IntEnum):
    """What is exchanged of a unit: most are ways in which it is gathered."""

    SLOT = 0  # into its slot
    COPY = 1  # slot contents, into memory of their own
    VALUES = 2  # the master values (or optimizer state), into memory of their own
    GRADIENTS = 3  # reduced ones, into memory of their own
    REDUCE = 4  # not gathered: its gradients are reduced


@dataclass(eq=False)
class Arena:
    """The memory of all slots, and who has it."""

    memory: Tensor  # [bytes]
    # whose values are in their slots, or come; few (or all, on one rank)
    holders: list[Unit] = field(default_factory=list)
    # those among them whose memory no other unit may take
    in_use: list[Unit] = field(default_factory=list)
    # what was gathered for single reads, while another one has the memory
    spilled: tuple[Unit, Tensor] | None = None


class Mark:
    """Stands for a unit in each ``SavedSlot``: its references tell how many tensors autograd saves
    in the slot.
    """

    __slots__ = ("unit",)


class Unit:
    """Parameters that are gathered, used and released together."""

    phase: Phase
    region: range  # bytes of the arena that its slot may take; other units share them
    # [bytes] there, in a storage of its own: torch counts the tensors that share one
    memory: Tensor
    storage: int  # its address; see count_viewers
    usual: int  # how many view it when nobody does but the engine
    pins: int  # uses that have not ended
    whole = False  # its shard is the whole: nothing ever moves
    # counts the times that some of its shards were written, by an optimizer's step or a load
    version: int
    in_arrays: list[Alias]  # of its weights, those of which the user made arrays
    # parameters hold values of their own (`gathered`): there is nothing to gather for a forward
    lent: bool
    # name -> full value, in a transform, see transforms.py; {}: written since
    spread: dict[str, Tensor] | None = None
    # tells ranks that have nothing to run what is gathered
    announce: Callable[[Unit, Exchange], None] | None
    note_kept: Callable[[Unit, bool], None]  # see kept_views.py

    def __init__(self, index: int, modules: UnitModules, chunks: list[Chunk]) -> None:
        self.index, self.chunks = index, chunks
        self.name, self.members = modules.name, modules.members
        self.root, self.nested = modules.root, modules.nested
        self.entries = [e for chunk in chunks for e in chunk.entries]
        self.trained = [e for e in self.entries if e.trained]
        # see residency/numbers.py
        self.numbers = [e.parameter for e in self.entries if e.size.numel() == 1]
        self.groups = tuple(dict.fromkeys(e.group for e in self.entries))
        self.nbytes = sum(chunk.nbytes for chunk in chunks)  # of the slot
        # name exchanges to other ranks
        self.labels = tuple(index * len(Exchange) + exchange for exchange in Exchange)
        self.phase, self.pins, self.version, self.announce, self.lent = (
            Phase.RESTING,
            0,
            0,
            None,
            False,
        )
        self.in_arrays, self.mark = [], Mark()
        self.mark.unit = self
        self.noted: dict[
            int, Any
        ] = {}  # views of its slot that others hold, by their ids; see kept_views.py
        self.lifted = Lifted(self.values)
        self._unshard_range = profile_range("unshard", self.name)
        self._wait_range = profile_range("wait", self.name)
        self._pending: list[Work] = []
        self._filled: torch.cuda.Event | None = None  # where the stream has filled the slot

    def connect(
        self, collectives: LocalCollectives, stream: Stream, arena: Arena, region: range
    ) -> None:
        """Take the slot at the start of ``region`` and point the parameters into it for good.

        The address never changes: autograd saves views such as ``weight.t()`` of the memory it saw
        in forward.
        """
        self._collectives, self._stream, self._arena, self.region = (
            collectives,
            stream,
            arena,
            region,
        )
        self.memory = torch.from_dlpack(arena.memory[region.start : region.stop])
        self._storage = self.memory.untyped_storage()
        self.storage = self._storage._cdata
        self._fills: list[tuple[Tensor, Tensor]] = []
        self._narrow = [chunk for chunk in self.chunks if chunk.wire_dtype != chunk.dtype]
        offset = 0
        for chunk in self.chunks:
            self._place(chunk, offset)
            offset += chunk.nbytes
        self.rest()
        self.usual = self.viewers()

    def _place(self, chunk: Chunk, offset: int) -> None:
        chunk.slot = self.memory[offset : offset + chunk.nbytes].view(chunk.dtype)
        sent = chunk.slot.view(chunk.wire_dtype)[-chunk.layout.numel :]
        chunk.bytes = sent.view(torch.uint8)
        shard = chunk.shard_of(sent, self._collectives.rank)
        self._fills += [
            (shard[piece.inside], piece.group.data[piece.place]) for piece in chunk.owned
        ]
        for entry, view in zip(chunk.entries, chunk.views(chunk.slot), strict=True):
            entry.parameter.data = view
            if entry.size.numel() == 1:
                entry.cls_at_rest = class_at_rest(
                    RestingParameter, view, f"parameter {entry.name!r} (unit {self.name})"
                )

    def own_views(self) -> list[Tensor]:
        """Tensors of the engine's in the slot, but for the parameters."""
        slots = [view for chunk in self.chunks for view in (chunk.slot, chunk.bytes)]
        return [self.memory, *slots, *(target for target, _ in self._fills)]

    def viewers(self) -> int:
        """How many tensors and others have the slot's memory that are neither saved by autograd nor
        noted; see ``usual``.
        """
        return (
            count_viewers(self.storage)
            + getrefcount(self._storage)
            - getrefcount(self.mark)
            - len(self.noted)
        )

    def gather(self, ahead: bool = False) -> bool:
        """Start filling the slot unless it is filled; False if another unit in use has the memory,
        or the values are lent.

        ``ahead``: of its use, while another unit runs.
        """
        if not ahead:
            # before anything that may wait for other ranks
            self._collectives.exchange_log.progress[0] = self.index
        if self.lent:
            return False
        if self.phase is not Phase.RESTING:
            return True
        start, stop, holders = self.region.start, self.region.stop, self._arena.holders
        for other in self._arena.in_use:
            if start < other.region.stop and other.region.start < stop:
                return False
        for other in tuple(holders):
            if start < other.region.stop and other.region.start < stop:
                other.release()
        with self._unshard_range:
            self._start()
        holders.append(self)
        self.phase = Phase.GATHERING
        if self.announce is not None:
            # ranks that assist do so at once, and may wait until all have what they gave
            self.arrive()
        return True

    def _start(self) -> None:
        if self.announce is not None:
            self.announce(self, Exchange.SLOT)
        # This overwrites what autograd may have saved views of; see saved_tensors.py. No torch.func
        # transform is to see it.
        with apart() if _modes() or _inference() else torch._C._DisableFuncTorch():
            if self._stream.on_device:
                with self._stream.fork():
                    self._send()
                    self._filled = self._stream.mark()
            else:
                self._send()

    def _send(self) -> None:
        for target, source in self._fills:
            target.copy_(source)
        for chunk in self.chunks:
            self._pending.append(
                self._collectives.all_gather(chunk.bytes, self.labels[Exchange.SLOT])
            )
        if self._narrow and self._stream.on_device:
            self._widen()

    def _widen(self) -> None:
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait()
        for chunk in self._narrow:
            widen(chunk.slot, chunk.wire_dtype, self._stream.room)

    def arrive(self) -> None:
        """Wait until the slot is filled."""
        if self.phase is Phase.GATHERING:
            # As in `_start`: on the CPU it is now that shards are copied.
            with apart() if _modes() or _inference() else torch._C._DisableFuncTorch():
                if self._narrow and self._pending:
                    self._widen()
                for pending in self._pending:
                    pending.wait()
            if self._stream.on_device:
                # hazard: computing with weights that are still arriving
                self._stream.join(self._filled)
            self._pending = []
            self.phase = Phase.READY

    def use(self) -> bool:
        """The parameters are ordinary and full from here to the matching :meth:`unuse`; False as of
        :meth:`gather`.
        """
        self._collectives.exchange_log.progress[0] = self.index
        if (self.phase is Phase.RESTING or self.lent) and not self.gather():
            return False
        if self.phase is Phase.GATHERING:
            with self._wait_range:
                self.arrive()
        if not self.pins:
            self.phase = Phase.IN_USE
            self._arena.in_use.append(self)
            self.in_arrays.clear()  # made of a view that was kept: what follows is about that
            for number in self.numbers:
                show(number)
            for entry in self.entries:
                entry.parameter.__class__ = entry.cls_while_used
                entry.seen = entry.parameter._version
            for place in tuple(self.noted.values()):  # a view may die meanwhile
                place.show(True)
        self.pins += 1
        return True

    def unuse(self, failed: bool = False) -> None:
        """End of one use, which an exception may have ``failed``. The values stay in the slot until
        another unit takes it.
        """
        self.pins -= 1
        if self.pins > 0:
            return
        self.phase = Phase.READY
        self._arena.in_use.remove(self)
        if self.lifted.places:
            self.lifted.drop()
        written = bool(self.in_arrays)
        for entry in self.entries:
            written |= entry.parameter._version != entry.seen
            entry.parameter.__class__ = entry.cls_at_rest
        for number in self.numbers:
            hide(number)
        for place in tuple(self.noted.values()):
            place.show(False)
        if written:
            try:
                self.keep_written()
            except ResidencyError:
                self.release()  # what cannot be stored is not computed with either
                raise
        # `viewers()`, without a call.
        if (
            count_viewers(self.storage)
            + getrefcount(self._storage)
            - getrefcount(self.mark)
            - len(self.noted)
            > self.usual
        ):
            self.note_kept(self, failed)

    def keep_written(self) -> None:
        """Parameters that were changed in place during this use: the shards get the values, which
        the ranks compare later.
        """
        self._note_arrays()
        for chunk in self.chunks:
            for entry, offset in zip(chunk.entries, chunk.layout.offsets, strict=True):
                if entry.parameter._version == entry.seen:
                    continue
                entry.written += 1
                if chunk.wire_dtype != chunk.master_dtype:
                    raise ResidencyError(
                        f"Parameter {entry.name!r} was changed in place while it is gathered in"
                        f" {chunk.wire_dtype}. That would round its {chunk.master_dtype} value."
                        " Change it between steps, in `with strategy.gathered(module,"
                        " modify=True):`."
                    )
                values = chunk.slot[offset : offset + entry.size.numel()]
                self._collectives.exchange_log.record_write(entry.name, values, in_step=True)
                if entry.part is not None:
                    with torch.no_grad():
                        entry.part.of(entry.group.data).copy_(
                            chunk.in_slot(entry.part, self._collectives.rank)
                        )
                entry.seen = entry.parameter._version

    def _note_arrays(self) -> None:
        """Find what was written to arrays of the user's: nothing counts that."""
        for alias in self.in_arrays:
            if alias.changed():
                for entry in self.entries_at(alias.now.data_ptr()):
                    entry.seen = -1

    def entries_at(self, address: int) -> Iterator[Entry]:
        """That of the parameter in whose place in the slot ``address`` is, if any."""
        for chunk in self.chunks:
            start, size = chunk.slot.data_ptr(), chunk.dtype.itemsize
            for entry, offset in zip(chunk.entries, chunk.layout.offsets, strict=True):
                if start + offset * size <= address < start + (offset + entry.size.numel()) * size:
                    yield entry

    def rest(self) -> None:
        """From now on every operation on the parameters is answered by
        :class:`RestingParameter`.
        """
        for entry in self.entries:
            entry.parameter.__class__ = entry.cls_at_rest
        for number in self.numbers:
            hide(number)

    def go_on(self) -> None:
        """After :meth:`rest` in the middle of a use, unless that has ended."""
        if self.pins:
            for number in self.numbers:
                show(number)
            for entry in self.entries:
                entry.parameter.__class__ = entry.cls_while_used

    def release(self) -> None:
        """Give the slot up."""
        if self.phase is Phase.GATHERING:
            self.arrive()  # hazard: the memory's next owner while ranks still send into it
        if self.phase is Phase.READY:
            self.phase = Phase.RESTING
            self._arena.holders.remove(self)

    def replayed(self, filled: bool) -> None:
        """A captured graph has filled the slot, or given it up."""
        if not filled:
            self.release()
        elif self.phase is Phase.RESTING:
            self.phase = Phase.READY
            self._arena.holders.append(self)

    def refresh(self, changed: Sequence[Entry]) -> None:
        """The shards of ``changed`` did: what is in the slot is no longer true."""
        if self.phase is Phase.IN_USE:
            self._note_arrays()
            for entry in self.entries:
                if entry.parameter._version != entry.seen:
                    raise ResidencyError(
                        f"Parameter {entry.name!r} was changed in place while it is in use, and its"
                        " shards by a step or a load that had begun before: one of the two would"
                        " be lost. Do not change it in an optimizer's closure."
                    )
            self._start()
            self.phase = Phase.GATHERING
            self.arrive()
            self.phase = Phase.IN_USE
            for alias in self.in_arrays:
                alias.before = alias.now.clone()
            self.lifted.renew()
        else:
            self.release()

    def abandon(self) -> None:
        """After an exception: no use is left, however many were open."""
        incomplete = self.phase is Phase.GATHERING
        self.phase, self.pins = Phase.IN_USE, 1
        self.unuse(failed=True)
        if incomplete:
            self._pending = []
            self.release()

    def full(
        self,
        flat: Callable[[FlatGroup], Tensor | None],
        dtype: torch.dtype | None = None,
        what: Exchange = Exchange.VALUES,
    ) -> dict[str, Tensor]:
        """Name -> full tensor (of ``dtype``, or its own) of what ``flat`` says each group has
        (None: zeros); collective.
        """
        result = {}
        for chunk in self.chunks:
            buffer = self._gather_apart(chunk, flat, dtype or chunk.master_dtype, what)
            result.update(
                {e.name: v for e, v in zip(chunk.entries, chunk.views(buffer), strict=True)}
            )
        return result

    def values(self) -> dict[str, Tensor]:
        """Name -> full master value, in memory of its own; collective."""
        if self.announce is not None:
            self.announce(self, Exchange.VALUES)
        return self.full(lambda group: group.data)

    def gradients(self) -> dict[str, Tensor]:
        """Name -> full reduced gradient, or zeros, in memory of its own; collective."""
        if self.announce is not None:
            self.announce(self, Exchange.GRADIENTS)
        return self.full(lambda group: group.grad, what=Exchange.GRADIENTS)

    def copy_of_slot(self) -> Tensor:
        """What the slot would hold [bytes], in memory of its own; collective."""
        if self.announce is not None:
            self.announce(self, Exchange.COPY)
        parts = [
            (self._gather_apart(c, lambda group: group.data, c.wire_dtype, Exchange.COPY), c.dtype)
            for c in self.chunks
        ]
        return torch.cat([part.to(dtype).view(torch.uint8) for part, dtype in parts])

    def spilled(self) -> Tensor:
        """:meth:`copy_of_slot`, once for reads that follow each other."""
        if self._arena.spilled is None or self._arena.spilled[0] is not self:
            self._arena.spilled = self, self.copy_of_slot()
        return self._arena.spilled[1]

    def _gather_apart(
        self,
        chunk: Chunk,
        flat: Callable[[FlatGroup], Tensor | None],
        dtype: torch.dtype,
        exchange: Exchange,
    ) -> Tensor:
        with apart():
            buffer = torch.empty(chunk.layout.numel, dtype=dtype, device=chunk.slot.device)
            chunk.load_shard(chunk.shard_of(buffer, self._collectives.rank), flat)
            self._collectives.all_gather(buffer.view(torch.uint8), self.labels[exchange]).wait()
        return buffer
