"""Values of resting parameters: reads inside a step, full values on demand, writes that reach the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..collectives import LocalCollectives, Meeting, checksum
from ..residency.resting import (
    NO_GRAPH_TASK,
    ResidencyError,
    ShardedCopy,
    graph_task,
    is_aliased,
    note_alias,
    set_data,
    set_grad,
    settle,
    told_of_gradient,
)
from .chunk import Entry
from .gradients import Gradients
from .unit import Unit, apart


class Access:
    """The home of all parameters of an engine; see :class:`~.residency.home.Home`."""

    in_step: bool  # all ranks run the same code: a read may gather

    def __init__(
        self,
        units: list[Unit],
        collectives: LocalCollectives,
        weights_changed: Callable[[dict[Unit, list[Entry]]], None],
        gradients: Gradients,
        settle_gradients: Callable[[str], None],
        retire: Callable[[], None],
    ) -> None:
        self._units, self._collectives, self._weights_changed = units, collectives, weights_changed
        self._gradients, self._settle_gradients = gradients, settle_gradients
        self.retire = retire
        self._owner: dict[int, tuple[Unit, Entry]] = {}
        self._held: WeakValueDictionary[str, ShardedCopy] = WeakValueDictionary()  # by the user, of each parameter
        self.in_step = False
        for unit in units:
            for entry in unit.entries:
                self._owner[id(entry.parameter)] = unit, entry
                settle(entry.parameter, f"{entry.name!r} (unit {unit.name})", entry.cls, entry.dtype, self)
                with torch._C.DisableTorchFunctionSubclass():
                    set_grad(entry.parameter, None)  # of an earlier run: autograd would add to it

    def read(self, parameter: nn.Parameter) -> Tensor:
        """See :meth:`~.residency.home.Home.read`."""
        _, entry = self._owner[id(parameter)]
        if not (self.in_step or graph_task() != NO_GRAPH_TASK):
            raise ResidencyError(
                f"The value of parameter {entry.name!r} is sharded over the ranks and was read outside a step. Read it in "
                "`training_step` (or another step), or inside `with strategy.gathered(module):` on all ranks."
            )
        differentiable = torch.is_grad_enabled() and entry.parameter.requires_grad
        with apart():
            value = self.full_values([parameter])[0].clone()
            if differentiable:
                # A transform that runs has not wrapped the parameter.
                with torch.enable_grad(), temporarily_clear_interpreter_stack():
                    return _Read.apply(parameter, value)
        return value

    def full_values(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """See :meth:`~.residency.home.Home.full_values`."""
        owners = [self._owner[id(p)] for p in parameters]
        values = {unit: unit.values() for unit in dict.fromkeys(unit for unit, _ in owners)}
        return [values[unit][entry.name] for unit, entry in owners]

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """See :meth:`~.residency.home.Home.write`."""
        unit, entry = self._owner[id(parameter)]
        value = value.detach().broadcast_to(entry.size)
        if unit.announce is None and not unit.whole:  # else other ranks may have nothing to run, or there are none
            noted = self._collectives.diary.written if self.in_step else self._collectives.diary.stored
            noted[entry.name] = checksum(value.to(entry.group.data.device, entry.dtype))
        entry.store(value, entry.group.data)
        self._weights_changed({unit: [entry]})

    def age(self, parameter: nn.Parameter) -> tuple[int, int]:
        """See :meth:`~.residency.home.Home.age`."""
        _, entry = self._owner[id(parameter)]
        return entry.changed, entry.written

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """See :meth:`~.residency.home.Home.gradient`."""
        unit, entry = self._owner[id(parameter)]
        self._settle_gradients(entry.name)
        grad = self._gradients.full(unit, entry)
        if grad is None:
            return None
        since, held = self._gradients.since(entry), self._held.get(entry.name)
        if held is None or held.since != since:
            held = self._held[entry.name] = ShardedCopy.of(grad, told_of_gradient(parameter), parameter, since)
        else:  # the same tensor as long as the user has it, as in torch
            with torch._C.DisableTorchFunctionSubclass():
                set_data(held, grad)
        return held

    def set_gradient(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """See :meth:`~.residency.home.Home.set_gradient`."""
        _, entry = self._owner[id(parameter)]
        if entry.trained:  # no optimizer would read another one's
            self._settle_gradients(entry.name)
            entry.assigned += 1
            self._gradients.assign(entry, grad)
            if isinstance(grad, ShardedCopy) and grad.parameter is parameter:
                grad.since, self._held[entry.name] = self._gradients.since(entry), grad

    def keep_gradient(self, gradient: ShardedCopy) -> None:
        """See :meth:`~.residency.home.Home.keep_gradient`."""
        _, entry = self._owner[id(gradient.parameter)]
        since = self._gradients.since(entry)
        if since[:2] != gradient.since[:2] or not self._gradients.has_gradient(entry):
            return  # it was cleared or replaced: an ordinary tensor, as in torch
        if since != gradient.since:
            raise ResidencyError(
                f"The gradient of parameter {entry.name!r} was read, a backward added to it, and then the tensor of before was "
                "changed. Read `parameter.grad` again after the backward."
            )
        self._gradients.assign(entry, gradient)

    @contextmanager
    def gathered(self, what: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool) -> Iterator[None]:
        """Inside, the parameters are ordinary and full; collective at entry, and at exit with ``modify``.

        Args:
            what: a module or parameters; those that this engine does not own are left alone.
            modify: at exit rank 0's values are stored, whatever the other ranks wrote.

        Raises:
            ResidencyError: at entry, a parameter is in use; at exit, one was written without ``modify``.
        """
        parameters = what.parameters() if isinstance(what, nn.Module) else [what] if isinstance(what, Tensor) else what
        found = {id(p): self._owner[id(p)] for p in parameters if id(p) in self._owner}  # once, however often it is named
        wanted = [(unit, entry) for unit, entry in found.values() if not unit.whole]
        values: dict[str, Tensor] = {}
        if wanted and wanted[0][0].announce is None:  # else ranks that have nothing to run take part
            self._collectives.meet(Meeting.GATHERED)
        for unit in dict.fromkeys(unit for unit, _ in wanted):
            full = unit.values()
            values.update({e.name: full[e.name].clone() for u, e in wanted if u is unit})
        _require_unused(wanted)
        aliased = [is_aliased(entry.parameter) for _, entry in wanted]
        slots = [_lend(unit, entry, values[entry.name]) for unit, entry in wanted]
        try:
            yield
            if not modify:
                _require_unwritten(wanted)
        finally:
            for (_, entry), slot, was in zip(wanted, slots, aliased, strict=True):
                values[entry.name] = entry.parameter.detach()
                set_data(entry.parameter, slot)
                note_alias(entry.parameter, was)  # what was read meanwhile is no slot
            for unit, _ in wanted:
                unit.lent = False
                unit.rest()
        if modify:
            for _, entry in wanted:
                value = values[entry.name].contiguous()
                self.write(entry.parameter, self._collectives.broadcast(value))


def _require_unused(wanted: list[tuple[Unit, Entry]]) -> None:
    for unit, entry in wanted:
        if unit.pins or unit.lent:
            raise ResidencyError(
                f"Parameter {entry.name!r} has its full value here, in a step or forward that uses it or another `gathered`, "
                "and is not gathered once more: read it, or change it in place, as it is."
            )


def _require_unwritten(wanted: list[tuple[Unit, Entry]]) -> None:
    for _, entry in wanted:
        if entry.parameter._version != entry.seen:
            raise ResidencyError(
                f"Parameter {entry.name!r} was changed inside `gathered`, and the change is lost. To store rank 0's values use "
                "`with strategy.gathered(..., modify=True):`."
            )


def _lend(unit: Unit, entry: Entry, value: Tensor) -> Tensor:
    """Make the parameter an ordinary one that holds ``value``; returns its place in the slot."""
    unit.lent = True
    entry.parameter.__class__ = entry.cls_while_used  # which counts writes to `.data`, too
    slot = Tensor.data.__get__(entry.parameter)  # past the class, for which the user would have read it
    set_data(entry.parameter, value)
    entry.seen = entry.parameter._version
    return slot


class _Read(torch.autograd.Function):
    """Connects a copy of a resting parameter's value to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
