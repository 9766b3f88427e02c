"""Which parameters have a gradient: those that any rank used since theirs was cleared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from ..collectives import ExchangeLog
from .chunk import Entry
from .norms import squared_norms
from .sharded import ResidencyError
from .unit import Unit


class Gradients:
    """Keeps the books of who has a gradient, from when it was cleared to the optimizer's step."""

    # of each trained parameter: it has a gradient, on any rank when no backward runs; what one adds
    # is this rank's until it ends
    used: bytearray
    before: str  # which there were when the last backward began, in words

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
        # of the unit asked for last, by name: usually its others are asked for next
        self._full: dict[str, Tensor] = {}
        self.over = False  # freed before the user cleared them

    # --------------------------------------------------------------------------------- a backward

    def begin_backward(self) -> None:
        """What it reduces is added to the gradients that there are; local."""
        for chunk in self.chunks:
            if not any(self.used[chunk.numbers]):
                chunk.has_sums = False
            elif chunk.has_sums and not all(self.used[chunk.numbers]):
                for entry in chunk.entries:
                    if not self.used[entry.number]:  # what comes next is added to nothing
                        entry.part_of(chunk.room_for_gradients()).zero_()
            if self.lasting:
                # allocated on the compute stream, which frees it, and not on the side stream
                chunk.room_for_gradients()
            elif not chunk.has_sums:
                chunk.gradients = None  # until its reduction: now the most memory is in use
        self.before = self._present("all, when a backward began", self.trained)

    def show(self, used: bytes) -> None:
        """What was reduced is complete; ``used`` says which parameters have a gradient on any
        rank.
        """
        self.used[:], self._full = used, {}

    # -------------------------------------------------------------------------------- who has one

    def has_gradient(self, entry: Entry) -> bool:
        """Whether optimizers see a gradient of ``entry``; the same on all ranks."""
        return bool(self.used[entry.number])

    def present(self, entry: Entry) -> bool:
        """Whether ``parameter.grad`` is not None; the same on all ranks. Reading it may raise."""
        if not entry.trained:
            return entry.name in self.dropped
        return self.over or self.has_gradient(entry)

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
        gradients.
        """
        self.forget()  # kernels may unscale gradients as they step
        self._exchange_log.record_step(
            [
                self._present(f"param group {number} of {optimizer}", entries)
                for number, entries in enumerate(groups)
            ]
        )

    def _present(self, group: str, entries: Sequence[Entry]) -> str:
        """How many of the parameters have gradients, or which have none, in words."""
        without = [entry.name for entry in entries if not self.used[entry.number]]
        if len(without) in (0, len(entries)):
            return f"{len(entries) - len(without)} gradients in {group}"
        return f"no gradients of {without} in {group}"

    # ----------------------------------------------------------------------------- `parameter.grad`

    def full(self, entry: Entry) -> Tensor:
        """The whole gradient of a parameter, in memory of its own; collective.

        Raises:
            ResidencyError: no optimizer has the parameter, or the gradient is over.
        """
        if not entry.trained:
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r}, which no optimizer has, was not"
                " kept.\nGive the parameter to an optimizer in `configure_optimizers` (a learning"
                " rate of 0 will do), or freeze it (`requires_grad_(False)`)."
            )
        self._require_there(entry)
        if entry.name not in self._full:
            self._full = entry.unit.gradients()
        return self._full[entry.name].clone()

    def squared_norm(self, entries: Iterable[Entry]) -> Tensor:
        """The squared 2-norm [] of this rank's parts of gradients, in float64; as :meth:`full`."""
        found: dict[Entry, Tensor] = {}
        unknown: dict[torch.device, list[Entry]] = defaultdict(list)
        # in one order, whatever that of the groups is: sums must be alike
        present = sorted(filter(self.present, entries), key=attrgetter("number"))
        for entry in present:
            self._require_there(entry)
            if (known := entry.chunk.squared_norms) is not None:
                found[entry] = known[entry.number - entry.chunk.numbers.start]
            else:
                unknown[entry.chunk.room_for_gradients().device].append(entry)
        # of a device together: nothing is allocated for each unit
        for its in unknown.values():
            parts = [entry.part_of(entry.chunk.room_for_gradients()) for entry in its]
            found |= zip(its, squared_norms(parts).to(its[0].chunk.device), strict=True)
        if not present:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack([found[entry] for entry in present]).sum()

    def _require_there(self, entry: Entry) -> None:
        if not self.has_gradient(entry):
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r} was freed when `training_step` began,"
                " because Lightning clears it before the next backward.\nRead it earlier"
                " (`on_before_optimizer_step`, `on_train_batch_end`), or define"
                " `on_before_zero_grad` in the module; before a backward inside of `training_step`"
                " call the module's `zero_grad()`."
            )

    def forget(self) -> None:
        """Gradients may have changed in place: read them anew."""
        self._full = {}
        for chunk in self.chunks:
            chunk.squared_norms = None

    def assign(self, entry: Entry, grad: Tensor) -> None:
        """Store a whole gradient that all ranks have; local."""
        if grad.layout != torch.strided:
            grad = grad.to_dense()  # before ranks part that own nothing of it
        grad = grad.detach().as_subclass(Tensor)
        on_device = grad.to(entry.chunk.device)
        self._exchange_log.record_write(entry.name, "assigned as gradient", on_device)
        if entry.name in self._full:
            self._full[entry.name].copy_(grad)
        self.room_for(entry).copy_(entry.cut(grad))

    def room_for(self, entry: Entry) -> Tensor:
        """Where this rank's part of a gradient of ``entry`` is to be written; it has one then."""
        if not any(self.used[entry.chunk.numbers]):
            entry.chunk.has_sums = False
        self.used[entry.number] = 1
        entry.chunk.squared_norms = None
        return entry.part_of(entry.chunk.gradients_or_zeros())

    def clear(self, entry: Entry) -> None:
        """``entry`` has no gradient any more, nor one that is held; local."""
        number = entry.number
        self.used[number] = self._written[number] = 0
        entry.assigned += 1
        self._full.pop(entry.name, None)

    def take_away(self) -> None:
        """Free gradients that will be cleared before anything is added to them; who asks for one
        until then is told.
        """
        if not self.lasting and any(self.used):
            self.over = True
            self.clear_all()

    def clear_all(self) -> None:
        """No parameter has a gradient any more; local."""
        for entry in filter(self.has_gradient, self.trained):
            self.clear(entry)
        for chunk in () if self.lasting else self.chunks:
            chunk.gradients = None
