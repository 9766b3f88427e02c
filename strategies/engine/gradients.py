"""Which gradients the optimizers see: the flat gradients of parameters that any rank used, and none
for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..collectives import ASSIGNED, CLEARED, ExchangeLog, Setting, checksum
from .reduction import Reducer
from .segments import Segment
from .sharded import ResidencyError
from .shards import Entry, FlatGroup
from .unit import Unit


class Gradients:
    """Keeps the books of who has a gradient, from the start of a window (gradients were cleared) to
    the optimizer's step.
    """

    settle: Callable[[str], None]  # see `Backward.settle`, which comes later
    drop_failed: Callable[[], None]  # see `Backward.drop_failed`
    used: bytearray  # of each trained parameter: this rank has a gradient since they were cleared

    def __init__(
        self,
        units: list[Unit],
        groups: list[FlatGroup],
        reducer: Reducer,
        exchange_log: ExchangeLog,
    ) -> None:
        self._units, self.reducer, self._exchange_log = units, reducer, exchange_log
        self._groups = [group for group in groups if group.trained]
        self.used = bytearray(sum(len(group.entries) for group in self._groups))
        self.arrived = bytearray(self.used)  # of each: in the backward that runs
        self._shown = bytearray(self.used)  # to the optimizers: any rank has one
        self._assigned: list[FlatGroup] = []  # the user set gradients of parameters in it
        self._full: dict[
            str, Tensor
        ] = {}  # of the unit asked for last, by name: usually its others are asked for next
        self._written: list[int] = []  # `written_by_others` of its groups then
        self._sums: dict[
            Entry, tuple[int, Tensor]
        ] = {}  # of gradients that users assigned or changed, and in which window
        self.over = False  # freed before the user cleared them

    def begin_windows(self, settles: bool = False) -> frozenset[int]:
        """A backward begins: cleared groups start afresh. Returns numbers of parameters whose
        optimizer is switched off. ``settles``: what was held is reduced, and nothing added.

        Raises:
            RuntimeError: it would add to nothing but gradients that an exception left incomplete.
        """
        muted, shown = frozenset[int](), []
        self.arrived[:] = bytes(len(self.arrived))
        for group in self._groups:
            if self.reducer.held and group.shows_gradients:
                self.reducer.drop_zeroed(group)
            shown.append(not group.begin_window(self.adopt_segments))
            if not shown[-1]:
                self.used[group.numbers] = self.reducer.written[group.numbers] = bytes(
                    len(group.entries)
                )
                self.reducer.begin_window(group)
            group.muted = group.switched_off
            if group.muted:
                muted = muted.union(entry.number for entry in group.entries)
        if not settles:
            wanted = [group for group in self._groups if not group.muted]
            for group in wanted:
                if group.incomplete:
                    self._look_for_zeros(group)
            if all(group.incomplete for group in wanted):
                self.require_complete(wanted)
        self._exchange_log.record_backward(self._present("an optimizer", self._groups, shown))
        return muted

    def give_back(self) -> None:
        """Free the memory of cleared gradients until the next reduction: when a backward begins the
        most memory is in use.
        """
        if not self.reducer.lasting:
            for group in self._groups:
                group.give_back()

    def take_away(self) -> None:
        """Free gradients that will be cleared before anything is added to them; who asks for one
        until then is told.
        """
        if not self.reducer.lasting and self.any_shown():
            self.over, self._full = True, {}
            for group in self._groups:
                group.clear()
                group.give_back()

    def give_up(self, held: bool) -> None:
        """An exception ended a backward that had added something: to gradients of before, or to
        none, which is dropped.

        So is what was ``held`` of earlier micro-batches.
        """
        for group in self._groups:
            if group.shows_gradients and (held or not group.muted):
                with group.written_by_engine():
                    for entry in group.entries:
                        if self._shown[entry.number]:
                            group.incomplete.add(entry)
                            continue
                        self.used[entry.number] = 0
                        if entry.part is not None:
                            entry.part.of(group.grad).zero_()
                group.left = group.written_by_others
        self.forget()

    def show_again(self) -> None:
        """A backward began, and an exception ended it: gradients that were out of its way are there
        again.
        """
        self._exchange_log.record_backward([])
        self.arrived[:] = bytes(len(self.arrived))

    def require_complete(self, groups: Iterable[FlatGroup]) -> None:
        """Raise a RuntimeError if an exception left gradients in ``groups`` incomplete, that were
        not cleared or replaced.

        Collective if there are some that were written to since.
        """
        for group in groups:
            if group.incomplete:
                self._look_for_zeros(group)
            if not (group.incomplete and group.shows_gradients):
                continue
            name = min(group.incomplete, key=lambda entry: entry.number).name
            raise RuntimeError(
                f"An exception ended a backward pass: gradients (of parameter {name!r} and others)"
                " accumulated before it are incomplete. Call `zero_grad()` and begin the"
                " accumulation anew."
            )

    def begin_step(self, optimizer: Optimizer, groups: list[FlatGroup]) -> None:
        """``optimizer`` steps on ``groups``: the ranks compare later with which gradients. As
        :meth:`require_complete`.
        """
        self.require_complete(groups)
        shown = [group.require_alike() for group in groups]
        name = type(optimizer).__name__
        self._exchange_log.record_step(
            [*self._present(name, groups, shown), *self._sums_in(name, groups)]
        )

    def _present(
        self, optimizer: str, groups: list[FlatGroup], any_shown: list[bool]
    ) -> list[Setting]:
        """Which parameters of ``groups`` have gradients."""
        found: list[Setting] = []
        for group, is_any in zip(groups, any_shown, strict=True):
            number, shown = group.key.group or 0, self._shown[group.numbers] if is_any else b""
            if not all(shown):
                without = [entry.name for entry in group.entries if not self._shown[entry.number]]
                found += [(optimizer, number, f"{CLEARED}{name!r}", 1) for name in without]
            found.append((optimizer, number, "gradients", sum(shown)))
        return found

    def assigned_sums(self) -> list[Setting]:
        """Of gradients that users assigned or changed and that are still there."""
        return self._sums_in("an optimizer", self._groups)

    def _sums_in(self, optimizer: str, groups: list[FlatGroup]) -> list[Setting]:
        """Of gradients in ``groups`` that users assigned or changed and that are still there."""
        # alike on all ranks, whoever was assigned first
        by_number = sorted(self._sums, key=lambda entry: entry.number)
        for entry in by_number:
            if self._sums[entry][0] != entry.group.begun or not self.has_gradient(entry):
                del self._sums[entry]  # cleared since
        found = [entry for entry in by_number if entry in self._sums and entry.group in groups]
        totals = torch.stack([self._sums[entry][1] for entry in found]).tolist() if found else []
        named = [(e.group.key.group or 0, f"{ASSIGNED}{e.name!r}") for e in found]
        return [(optimizer, *name, total) for name, total in zip(named, totals, strict=True)]

    def _look_for_zeros(self, group: FlatGroup) -> None:
        """Gradients that were incomplete are cleared by `zero_grad(set_to_none=False)`, too."""
        if group.shows_gradients and group.left != group.written_by_others and not self.announced:
            group.left = group.written_by_others
            if self.reducer.is_zero(group):
                group.incomplete.clear()

    def any_shown(self) -> bool:
        """Whether a backward has ended since some gradients were cleared."""
        return any(group.shows_gradients for group in self._groups)

    def present(self, entry: Entry) -> bool:
        """Whether ``parameter.grad`` is not None; the same on all ranks. Reading it may raise."""
        if not entry.trained:
            return entry.dropped
        self.require_not_arrived(entry)
        self.adopt_replaced()
        return self.has_gradient(entry) or self.over  # of which only reading it is an error

    def full(self, entry: Entry) -> Tensor:
        """The whole gradient of a parameter, in memory of its own; collective.

        Raises:
            ResidencyError: it is not there, or on its way.
        """
        if not entry.trained:
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r}, which no optimizer has, was not"
                " kept: it would pile up, whole, on every rank. Give the parameter to an"
                " optimizer in `configure_optimizers` (a learning rate of 0 will do), or freeze"
                " it (`requires_grad_(False)`)."
            )
        if self.over and not self.has_gradient(entry):
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r} was freed when `training_step`"
                " began, because Lightning clears it before the next backward. Read it earlier"
                " (`on_before_optimizer_step`, `on_train_batch_end`), or define"
                " `on_before_zero_grad` in the module: then gradients stay until that hook is"
                " over. For gradients of a backward inside of `training_step`, call the"
                " module's `zero_grad()` first."
            )
        self.require_not_arrived(entry)
        self.adopt_replaced()
        if entry in entry.group.incomplete:
            self.require_complete([entry.group])
        unit = self._units[entry.unit]
        if unit.announce is not None:
            return unit.gradients()[entry.name]  # and none is kept, as ranks that assist keep none
        written = [group.written_by_others for group in unit.groups]
        if entry.name not in self._full or written != self._written:
            self._full, self._written = unit.gradients(), written
            for each in filter(self.has_gradient, unit.trained):
                begun, assigned = self._sums.get(each, (-1, None))
                if assigned is not None and begun == each.group.begun:
                    self._exchange_log.record_gradient_read(each.name, assigned)
        return self._full[entry.name].clone()

    def clear(self, entries: list[Entry]) -> None:
        """Nobody sees gradients of ``entries`` any more; local."""
        for entry in filter(self.has_gradient, entries):
            self.assign(entry, None)
            entry.assigned += 1
        self.adopt()

    def require_not_arrived(self, entry: Entry) -> None:
        """Raise if the backward that runs has added to the gradient of ``entry``: nobody reads it
        then, or changes it.
        """
        if entry.trained and self.arrived[entry.number]:
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r} was read in a backward that has computed"
                " it (in a module's hook, or another parameter's), when it is this rank's own, and"
                " on its way to the others. Read it after the backward (`on_after_backward`), or"
                " in a hook of the parameter itself."
            )

    def assign(self, entry: Entry, grad: Tensor | None) -> None:
        """Store a whole gradient that all ranks have, or clear it; local. The optimizers see it
        after :meth:`adopt`.
        """
        if grad is not None and grad.shape != entry.size:
            raise RuntimeError(
                f"Parameter {entry.name!r} has shape {tuple(entry.size)} and was given a gradient"
                f" of shape {tuple(grad.shape)}."
            )
        if grad is not None and self.announced:
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r} was assigned or changed in a step of an"
                " evaluation that not all ranks run: those that have no batch left would not store"
                " their part of it. Work on a copy (`p.grad.clone()`)."
            )
        if grad is not None and grad.layout != torch.strided:
            grad = grad.to_dense()  # before ranks part that own nothing of it
        self.adopt_replaced()
        self.mark_gradient(entry, grad is not None)
        if grad is None:
            self._full.pop(entry.name, None)
            self._sums.pop(entry, None)
            if entry.part is not None and entry.group.shows_gradients:
                with entry.group.written_by_engine():
                    entry.part.of(
                        entry.group.grad
                    ).zero_()  # the next backward adds to those that are left
        else:
            grad = grad.detach().as_subclass(Tensor)
            self._sums[entry] = entry.group.begun, checksum(grad.to(entry.group.data.device))
            if entry.name in self._full:
                self._full[entry.name].copy_(grad)
            with entry.group.written_by_engine():
                entry.store(grad, entry.group.grad)

    def adopt(self) -> None:
        """Gradients that were assigned one by one become visible together: each cut of a group is
        for good.
        """
        self.adopt_replaced()
        # `toggle_optimizer` has noted the flat tensors that it switched off, and will not know
        # their parts.
        now = [group for group in dict.fromkeys(self._assigned) if not group.switched_off]
        self._assigned = [group for group in self._assigned if group not in now]
        for group in now:
            if group.shows_gradients:
                unused = group.ranges_without(self._shown)
                with group.written_by_engine():
                    for start, stop in unused:
                        # what was done to a flat gradient before it is cut was done to these
                        group.grad[start:stop].zero_()
                group.bind(unused)

    def adopt_replaced(self) -> None:
        """Gradients that an optimizer, in its step, has put in the place of the flat ones are these
        from here on.
        """
        for group in self._groups:
            group.adopt(self.adopt_segments)

    def adopt_segments(self, group: FlatGroup, segments: list[Segment]) -> None:
        """An optimizer has put gradients in ``segments`` of ``group`` in the place of others, or of
        none; they come next.
        """
        new = any(not segment.shown for segment in segments)
        if not (had := sum(segment.shown for segment in group.segments)):
            self._begin_anew(group)
        if len(segments) != (had or len(group.segments)) or (new and had):
            raise group.not_alike()
        for entry in group.entries:
            if new:
                self.used[entry.number] = self._shown[entry.number] = True
            if self._shown[entry.number]:
                entry.assigned += 1  # what users hold of the gradient before is over
                group.incomplete.discard(entry)

    def _begin_anew(self, group: FlatGroup) -> None:
        """The user gives ``group`` gradients, which were cleared."""
        group.begun += 1
        group.incomplete.clear()
        self.used[group.numbers] = self._shown[group.numbers] = bytes(len(group.entries))

    def show(self, used: bytes) -> None:
        """The reduced gradients are complete; ``used`` says which parameters have one on any
        rank.
        """
        self._shown, self._full = bytearray(used), {}
        self.arrived[:] = bytes(len(self.arrived))
        for group in self._groups:
            flags = used[group.numbers]
            if group.muted:
                continue  # as it was
            if any(flags):
                group.bind([] if all(flags) else group.ranges_without(used))
            else:
                # uncut: `toggle_optimizer` will look for the tensors that it switched off
                group.clear()
        self.reducer.note_held(self._groups)

    def has_gradient(self, entry: Entry) -> bool:
        """Whether the optimizers see a gradient of ``entry``; the same on all ranks."""
        return bool(self._shown[entry.number]) and entry.group.shows_gradients

    def since(self, entry: Entry) -> tuple[int, int]:
        """Of the gradient of ``entry``: its window, and how many were assigned before."""
        return entry.group.begun, entry.assigned

    @property
    def announced(self) -> bool:
        """Whether this rank tells others, that assist, what it exchanges."""
        return self._units[0].announce is not None

    def forget(self) -> None:
        """The flat gradients may change: read them anew."""
        self._full = {}

    def mark_gradient(self, entry: Entry, present: bool) -> None:
        """The flat gradient holds one of ``entry`` from here on, or none."""
        group = entry.group
        if not group.shows_gradients:
            if not present:
                return
            self._begin_anew(group)
            group.clear()
            self.reducer.begin_window(group)
            group.grad.zero_()
            group.segments[-1].show(group.grad)
        if present and entry.part is not None:
            # `zero_grad(set_to_none=False)` looks for it there
            group.show(entry.part.start, entry.part.stop)
        self.used[entry.number] = self._shown[entry.number] = present
        group.incomplete.discard(entry)
        if any(self._shown[group.numbers]):
            self._assigned.append(group)
        else:
            group.clear()
