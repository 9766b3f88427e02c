"""What autograd saves in a step, in host memory until backward needs it.

::

    compute   u0   u1   u2 | backward   u2     u1     u0        u: a unit, and what follows it
    copies       D2H(u0) D2H(u1)        H2D(u1) H2D(u0)

Autograd keeps whole storages alive, by views of them, and these are what moves: each once, however
many views of it are saved. What is saved between the forwards of two units is a group: it leaves
when the next unit begins, and is freed when the one after that does; it comes back when backward
first needs something of the group after it. What is saved last stays.

To the engine this is a pair of saved-tensor hooks in the place of its own, around whole steps, too:
what is saved outside of units (inputs of checkpoints) moves as well. Weights are left to the
engine's, which save them as places in their unit's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from .engine import Zero3Engine, is_in_buffer
from .engine.hooks import ModuleHook
from .engine.isolation import isolated
from .engine.offload import HostMemory
from .engine.streams import Stream
from .support import parse_size
from .support.torch_internals import NO_GRAPH_TASK, DisableTorchFunction, graph_task

ActivationsKind = Literal["host"]
SMALLEST = 1 << 16  # bytes of a storage that is worth a copy


def parse_activations(value: str | None) -> int | None:
    """What the option says: "host", or how much may stay on the device; None: all does.

    Raises:
        ValueError: it is neither.
    """
    if value is None:
        return None
    return 0 if value == "host" else parse_size("activations", "'host'", value)


@dataclass(eq=False)
class _Group:
    before: _Group | None = None
    members: WeakSet[Stored] = field(default_factory=WeakSet)
    is_away = False  # not on the device


@dataclass(eq=False)
class Stored:
    """A storage, as it was when autograd saved tensors in it."""

    here: Tensor  # in that storage; without memory while it is away
    group: _Group
    identity: StorageWeakRef  # while it lives no other storage has the address
    host: Tensor  # [bytes]; without memory if it has not left


class SavedActivation(NamedTuple):
    """A tensor in a storage that may be away."""

    # it without its memory, which shares the count of writes; and the count when it was saved
    witness: tuple[Tensor, int]
    stored: Stored
    stride: tuple[int, ...]
    offset: Any


class Activations:
    """Where the steps of ``engine`` keep what they save, until it is closed; not with collectives
    that are alone, where parameters are no views of buffers.

    Args:
        budget: bytes that may stay on the device, of what is saved last, beside two groups that are
            on their way.
        streams: makes that of the copies.
    """

    def __init__(
        self,
        budget: int,
        engine: Zero3Engine,
        streams: Callable[[torch.device], Stream] = Stream,
    ) -> None:
        self._budget, self._device, self._stream = budget, engine.device, streams(engine.device)
        self._others = engine.saved_tensors  # whose hooks are for what does not move
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        engine.saved_tensors.hooks, engine.around_step = self._hooks, self.step
        turn = torch.compiler.disable(self._turn)
        engine.handles += [
            # before the unit is waited for, whose weights may still be arriving
            module.register_forward_pre_hook(ModuleHook(turn), prepend=True)
            for unit in engine.units
            for module in unit.members
        ]
        self.memory = HostMemory(0, self._device)
        # by address and version of the storage
        self._known: WeakValueDictionary[tuple[int, int], Stored] = WeakValueDictionary()
        # one element of any dtype, in place of all that are elsewhere
        self._nothing = torch.empty(16, dtype=torch.uint8, device=self._device)
        self._open: _Group | None = None  # what is saved now; None: it stays
        # a group that is copied, and what must live until that ends
        self._flight: tuple[_Group, list[tuple[Tensor, Tensor]]] | None = None
        self._mark: Any = None  # the end of the last copies
        self._saved = self._moved = self._most = 0  # bytes in this step; the most saved in any

    @contextmanager
    def step(self) -> Iterator[None]:
        """What is saved inside may move."""
        self._land(drop=True)
        if not self._known:
            if (needed := self.memory.taken) > self.memory.nbytes:
                # Here, where all ranks are or have been: to register memory waits for the device.
                self._stream.wait(self._mark)  # hazard: memory that goes while it is being copied
                self.memory = HostMemory(0, self._device)  # no longer than the old is needed
                # batches that grow a little each time would each have memory registered
                self.memory = HostMemory(needed * 9 // 8, self._device)
            self.memory.taken = 0
        self._most = max(self._most, self._saved)
        self._saved = self._moved = 0
        self._open = _Group()
        try:
            with self._hooks:
                yield
        finally:
            self._open = None

    def _pack(self, tensor: Tensor) -> Any:
        packed: Any = self._others.pack(tensor)
        if type(packed) is tuple:
            with DisableTorchFunction():
                try:
                    return self._take(*packed) or packed
                except RuntimeError:  # a nested tensor, or another without one plain storage
                    pass
        return packed

    def _take(self, held: Tensor, version: int) -> SavedActivation | None:
        """``held``, detached, is saved; None if it does not move."""
        group = self._open
        if group is None or graph_task() != NO_GRAPH_TASK or held.device != self._device:
            return None
        if type(held) is not Tensor or held.layout != torch.strided or is_in_buffer(held):
            return None
        storage = held.untyped_storage()
        if storage.nbytes() < SMALLEST or held.is_conj() or held.is_neg():
            return None
        key = storage._cdata, version
        if (stored := self._known.get(key)) is None:
            stored = Stored(held, group, StorageWeakRef(storage), self._nothing)
            self._known[key] = stored
            group.members.add(stored)
            self._saved += storage.nbytes()
        witness = held.detach()
        witness.data = self._nothing.view(held.dtype)[0].expand(held.shape)
        return SavedActivation((witness, version), stored, held.stride(), held.storage_offset())

    def _turn(self, *_: Any) -> None:
        """A unit's forward begins: what was saved since another's has leaves."""
        group = self._open
        if group is None or not group.members or graph_task() != NO_GRAPH_TASK:
            return
        self._land(drop=True)
        self._open = _Group(group)
        kept = self._saved - self._moved
        if self._moved >= self._most - self._budget and kept <= self._budget:
            return
        pairs = []
        with isolated():
            for stored in group.members:
                source = torch.empty(0, dtype=torch.uint8, device=self._device)
                source.set_(stored.here.untyped_storage())
                stored.host = self.memory.take(source.nbytes, torch.uint8)
                pairs.append((stored.host, source))
                self._moved += source.nbytes
            self._copy(group, pairs)

    def _unpack(self, saved: Any) -> Tensor:
        if type(saved) is not SavedActivation:
            return self._others.unpack(saved)
        witness = self._others.unpack(saved.witness)
        group = saved.stored.group
        self._load(group)
        if self._flight is not None and self._flight[0] is group:
            self._land()
        if group.before is not None:
            self._load(group.before)
        storage = saved.stored.here.untyped_storage()
        empty = torch.empty(0, dtype=witness.dtype, device=self._device)
        return empty.set_(storage, saved.offset, witness.shape, saved.stride)

    def _load(self, group: _Group) -> None:
        if group.is_away:
            self._land()
            group.is_away, pairs = False, []
            with isolated():
                for stored in group.members:
                    stored.here = torch.empty_like(stored.host, device=self._device)
                    pairs.append((stored.here, stored.host))
                self._copy(group, pairs)

    def _copy(self, group: _Group, pairs: list[tuple[Tensor, Tensor]]) -> None:
        def work() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        if self._stream.on_device:
            self._mark = self._stream.run(work, [target for target, _ in pairs])
        else:
            work()
        self._flight = group, pairs

    def _land(self, drop: bool = False) -> None:
        """``drop``: in a forward, where what is on its way leaves."""
        if self._flight is not None:
            # hazards: memory that is freed, and another's, while it is being copied; computing with
            # what is still arriving
            self._stream.join(self._mark)
            group, self._flight = self._flight[0], None
            for stored in group.members if drop else ():
                stored.here = self._nothing
            group.is_away |= drop
