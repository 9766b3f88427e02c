"""Which parameters have a gradient: those that any rank used since theirs was cleared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from ..collectives import ExchangeLog, Setting
from .chunk import Chunk, Entry
from .norms import squared_norms
from .sharded import ResidencyError
from .unit import Unit


class Gradients:
    """Keeps the books of who has a gradient, from when it was cleared to the optimizer's step."""

    # of each trained parameter: it has a gradient, on any rank when no backward runs; what one adds
    # is this rank's until it ends
    used: bytearray

    def __init__(self, units: list[Unit], written: bytearray, exchange_log: ExchangeLog) -> None:
        """``written``: see :class:`~.reduction.Reducer`."""
        self._written, self._exchange_log = written, exchange_log
        self.trained = [entry for unit in units for entry in unit.trained]  # by number
        self.chunks = [chunk for unit in units for chunk in unit.chunks if chunk.trained]
        self.used = bytearray(len(self.trained))
        # cleared gradients keep their memory: somebody has its address, or a device's allocator
        # might cut it up
        self.lasting = any(unit.hosted or unit.chunks[0].device.type != "cpu" for unit in units)
        # names of parameters that no optimizer has, and that got a gradient, which would pile up,
        # whole, on every rank
        self.dropped: set[str] = set()
        self._incomplete: dict[Entry, str] = {}  # why its gradient must be cleared
        # of the unit asked for last, by name: usually its others are asked for next
        self._full: dict[str, Tensor] = {}
        self.over = False  # freed before the user cleared them

    # --------------------------------------------------------------------------------- a backward

    def begin_backward(self) -> None:
        """What it reduces is added to the gradients that there are; local.

        Raises:
            RuntimeError: they are all incomplete.
        """
        if self._incomplete and len(self._incomplete) == len(self.trained):
            self.require_complete(self.trained)
        for chunk in self.chunks:
            if not any(self.used[chunk.numbers]):
                chunk.has_sums = False
            elif not all(self.used[chunk.numbers]):
                self._zero_cleared(chunk)
            if self.lasting:
                # allocated on the compute stream, which frees it, and not on the side stream
                chunk.room_for_gradients()
            elif not chunk.has_sums:
                chunk.gradients = None  # until its reduction: now the most memory is in use
        before = self._present("an optimizer, when a backward began,", 0, self.trained)
        self._exchange_log.backward_settings = [before]

    def show(self, used: bytes) -> None:
        """What was reduced is complete; ``used`` says which parameters have a gradient on any
        rank.
        """
        self.used[:] = used
        self.forget()

    def give_up(self, before: bytes) -> None:
        """An exception ended a backward: those that there were ``before`` must be cleared."""
        self.used[:] = before
        for entry in filter(self.has_gradient, self.trained):
            self.note_incomplete(entry, "An exception ended a backward pass")
        self.forget()

    def _zero_cleared(self, chunk: Chunk) -> None:
        """What comes next is added to nothing where a parameter has no gradient."""
        for entry in chunk.entries if chunk.has_sums else ():
            if not self.used[entry.number]:
                entry.part_of(chunk.room_for_gradients()).zero_()

    # -------------------------------------------------------------------------------- who has one

    def has_gradient(self, entry: Entry) -> bool:
        """Whether optimizers see a gradient of ``entry``; the same on all ranks."""
        return bool(self.used[entry.number])

    def present(self, entry: Entry) -> bool:
        """Whether ``parameter.grad`` is not None; the same on all ranks. Reading it may raise."""
        if not entry.trained:
            return entry.name in self.dropped
        # what is over, or lost, is there to be cleared
        return bool(self.used[entry.number]) or self.over or entry in self._incomplete

    def require_complete(self, entries: Iterable[Entry]) -> None:
        """Raise a RuntimeError if a gradient of ``entries`` is incomplete, and was not cleared or
        replaced.
        """
        for entry in entries if self._incomplete else ():
            if reason := self._incomplete.get(entry):
                raise RuntimeError(
                    f"{reason}: gradients (of parameter {entry.name!r} and others) accumulated"
                    " before it are incomplete. Call `zero_grad()` and begin the accumulation"
                    " anew."
                )

    def note_incomplete(self, entry: Entry, reason: str) -> None:
        """The gradient of ``entry`` must be cleared before it is used."""
        self._incomplete[entry] = reason

    # ------------------------------------------------------------------------ what optimizers see

    def part(self, entry: Entry) -> Tensor | None:
        """This rank's part [elements] of a gradient, in the chunk's memory; None if there is
        none.
        """
        if not self.has_gradient(entry):
            return None
        return entry.part_of(entry.chunk.room_for_gradients())

    def begin_step(self, optimizer: str, groups: Sequence[Sequence[Entry]]) -> None:
        """An optimizer steps on parameters in ``groups``: the ranks compare later with which
        gradients. As :meth:`require_complete`.
        """
        self.require_complete(entry for entries in groups for entry in entries)
        self.forget_norms()  # kernels may unscale gradients as they step
        self._exchange_log.record_step(
            [self._present(optimizer, number, entries) for number, entries in enumerate(groups)]
        )

    def _present(self, optimizer: str, group: int, entries: Sequence[Entry]) -> Setting:
        """How many of the parameters have gradients, or which have none."""
        without = [entry.name for entry in entries if not self.used[entry.number]]
        if len(without) in (0, len(entries)):
            return optimizer, group, "gradients", len(entries) - len(without)
        return optimizer, group, "parameters without gradients", without

    # ----------------------------------------------------------------------------- `parameter.grad`

    def full(self, entry: Entry) -> Tensor:
        """The whole gradient of a parameter, in memory of its own; collective.

        Raises:
            ResidencyError: it is not there, or on its way.
        """
        if not entry.trained:
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r}, which no optimizer has, was not"
                " kept.\nGive the parameter to an optimizer in `configure_optimizers` (a learning"
                " rate of 0 will do), or freeze it (`requires_grad_(False)`)."
            )
        self._require_readable(entry)
        if entry.name not in self._full:
            self._full = entry.unit.gradients()
        return self._full[entry.name].clone()

    def squared_norm(self, entries: Iterable[Entry]) -> Tensor:
        """The squared 2-norm [] of this rank's parts of all gradients that there are, in float64.

        Raises:
            ResidencyError: as :meth:`full`.
        """
        by_chunk: dict[Chunk, list[Entry]] = defaultdict(list)
        # a chunk's known norms have its order, whatever that of the groups is: sums must be alike
        for entry in sorted(filter(self.present, entries), key=attrgetter("number")):
            self._require_readable(entry)
            by_chunk[entry.chunk].append(entry)
        found: dict[Chunk, Tensor] = {}
        unknown: dict[torch.device, dict[Chunk, list[Tensor]]] = defaultdict(dict)
        for chunk, its in by_chunk.items():
            if (known := chunk.squared_norms) is not None:
                numbers = [entry.number - chunk.numbers.start for entry in its]
                is_all = len(its) == len(known)
                found[chunk] = known if is_all else torch.stack([known[n] for n in numbers])
            else:
                gradients = chunk.room_for_gradients()
                unknown[gradients.device][chunk] = [entry.part_of(gradients) for entry in its]
        # of a device together: nothing is allocated for each unit
        for parts in unknown.values():
            norms = squared_norms([part for its in parts.values() for part in its])
            found |= zip(parts, norms.split([*map(len, parts.values())]), strict=True)
        zero = torch.zeros(1, dtype=torch.float64)
        in_order = [found[chunk] for chunk in by_chunk]
        on_host = torch.cat([zero, *(norms for norms in in_order if norms.device == zero.device)])
        on_device = [norms for norms in in_order if norms.device != zero.device]
        # what lies in host memory is one copy to the device
        return torch.cat(
            [*on_device, on_host.to(on_device[0].device)] if on_device else [on_host]
        ).sum()

    def _require_readable(self, entry: Entry) -> None:
        if self.over and not self.has_gradient(entry):
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r} was freed when `training_step`"
                " began, because Lightning clears it before the next backward.\nRead it earlier"
                " (`on_before_optimizer_step`, `on_train_batch_end`), or define"
                " `on_before_zero_grad` in the module; before a backward inside of"
                " `training_step` call the module's `zero_grad()`."
            )
        self.require_complete([entry])

    def forget(self) -> None:
        """The shards may have changed: read them anew."""
        self._full = {}

    def forget_norms(self) -> None:
        """Gradients may have changed in place."""
        for chunk in self.chunks:
            chunk.squared_norms = None

    def assign(self, entry: Entry, grad: Tensor) -> None:
        """Store a whole gradient that all ranks have; local."""
        if grad.shape != entry.size:
            raise RuntimeError(
                f"Parameter {entry.name!r} has shape {tuple(entry.size)} and was given a gradient"
                f" of shape {tuple(grad.shape)}."
            )
        if grad.layout != torch.strided:
            grad = grad.to_dense()  # before ranks part that own nothing of it
        grad = grad.detach().as_subclass(Tensor)
        self._exchange_log.record_write(entry.name, "assigned", grad.to(entry.chunk.device))
        if entry.name in self._full:
            self._full[entry.name].copy_(grad)
        self.room_for(entry).copy_(entry.cut(grad))

    def room_for(self, entry: Entry) -> Tensor:
        """Where this rank's part of a gradient of ``entry`` is to be written; it has one then."""
        if not any(self.used[entry.chunk.numbers]):
            entry.chunk.has_sums = False
        self.used[entry.number] = 1
        self._incomplete.pop(entry, None)
        entry.chunk.squared_norms = None
        return entry.part_of(entry.chunk.gradients_or_zeros())

    def clear(self, entry: Entry) -> None:
        """``entry`` has no gradient any more, nor one that is held; local."""
        number = entry.number
        self.used[number] = self._written[number] = 0
        entry.assigned += 1
        self._incomplete.pop(entry, None)
        self._full.pop(entry.name, None)

    def take_away(self) -> None:
        """Free gradients that will be cleared before anything is added to them; who asks for one
        until then is told.
        """
        if not self.lasting and any(self.used):
            self.over = True
            for entry in filter(self.has_gradient, self.trained):
                self.clear(entry)
            for chunk in self.chunks:
                chunk.gradients = None
