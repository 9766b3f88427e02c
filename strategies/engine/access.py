"""Values of resting parameters: reads inside a step, full values on demand, writes that reach the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..collectives import LocalCollectives, checksum
from ..residency import ResidencyError, ShardedCopy, set_data, settle
from .chunk import Entry
from .gradients import Gradients
from .unit import Unit

# Identity of the backward pass that runs in this thread.
graph_task = torch._C._current_graph_task_id
NO_GRAPH_TASK = -1


class Access:
    """The home of all parameters of an engine; see :class:`~.residency.resting.Home`."""

    in_step: bool  # all ranks run the same code: a read may gather

    def __init__(
        self,
        units: list[Unit],
        collectives: LocalCollectives,
        weights_changed: Callable[[], None],
        gradients: Gradients,
        settle_gradients: Callable[[], None],
        retire: Callable[[], None],
    ) -> None:
        self._units, self._collectives, self._weights_changed = units, collectives, weights_changed
        self._gradients, self._settle_gradients = gradients, settle_gradients
        self.retire = retire
        self._owner: dict[int, tuple[Unit, Entry]] = {}
        self.in_step = False
        for unit in units:
            for entry in unit.entries:
                self._owner[id(entry.parameter)] = unit, entry
                settle(entry.parameter, f"{entry.name!r} (unit {unit.name})", entry.cls, entry.dtype, self)

    def read(self, parameter: nn.Parameter) -> Tensor:
        """See :meth:`~.residency.resting.Home.read`."""
        _, entry = self._owner[id(parameter)]
        if not (self.in_step or graph_task() != NO_GRAPH_TASK):
            raise ResidencyError(
                f"The value of parameter {entry.name!r} is sharded over the ranks and was read outside a step. Read it in "
                "`training_step` (or another step), or inside `with strategy.gathered(module):` on all ranks."
            )
        value = self.full_values([parameter])[0].clone()
        if torch.is_grad_enabled() and entry.parameter.requires_grad:
            with temporarily_clear_interpreter_stack():  # a transform that runs has not wrapped the parameter
                return _Read.apply(parameter, value)
        return value

    def full_values(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """See :meth:`~.residency.resting.Home.full_values`."""
        owners = [self._owner[id(p)] for p in parameters]
        values = {unit: unit.values() for unit in dict.fromkeys(unit for unit, _ in owners)}
        return [values[unit][entry.name] for unit, entry in owners]

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """See :meth:`~.residency.resting.Home.write`."""
        unit, entry = self._owner[id(parameter)]
        value = value.detach().broadcast_to(entry.size)
        if self.in_step and unit.announce is None and not unit.whole:
            self._collectives.diary.written[entry.name] = checksum(value.to(entry.group.data.device, entry.dtype))
        entry.store(value, entry.group.data)
        self._weights_changed()

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """See :meth:`~.residency.resting.Home.gradient`."""
        self._settle_gradients()
        grad = self._gradients.full(*self._owner[id(parameter)])
        return None if grad is None else ShardedCopy.of(grad, parameter=parameter)

    def set_gradient(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """See :meth:`~.residency.resting.Home.set_gradient`."""
        _, entry = self._owner[id(parameter)]
        if entry.trained:  # no optimizer would read another one's
            self._settle_gradients()
            self._gradients.assign(entry, grad)

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
        wanted = [self._owner[id(p)] for p in parameters if id(p) in self._owner]
        wanted = [(unit, entry) for unit, entry in wanted if not unit.whole]
        values: dict[str, Tensor] = {}
        for unit in dict.fromkeys(unit for unit, _ in wanted):
            full = unit.values()
            values.update({e.name: full[e.name].clone() for u, e in wanted if u is unit})
        _require_unused(wanted)
        slots = [_lend(unit, entry, values[entry.name]) for unit, entry in wanted]
        before = [entry.parameter._version for _, entry in wanted]
        try:
            yield
            if not modify:
                _require_unwritten(wanted, before)
        finally:
            for (_, entry), slot in zip(wanted, slots, strict=True):
                values[entry.name] = entry.parameter.data
                set_data(entry.parameter, slot)
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
            where = "its unit's forward" if unit.pins else "another `gathered`"
            raise ResidencyError(f"Parameter {entry.name!r} is in use: `gathered` does not work inside {where}.")


def _require_unwritten(wanted: list[tuple[Unit, Entry]], before: list[int]) -> None:
    for (_, entry), version in zip(wanted, before, strict=True):
        if entry.parameter._version != version:
            raise ResidencyError(
                f"Parameter {entry.name!r} was changed inside `gathered`, and the change is lost. To store rank 0's values use "
                "`with strategy.gathered(..., modify=True):`."
            )


def _lend(unit: Unit, entry: Entry, value: Tensor) -> Tensor:
    """Make the parameter an ordinary one that holds ``value``; returns its place in the slot."""
    unit.lent = True
    entry.parameter.__class__ = entry.cls_while_used  # which counts writes to `.data`, too
    slot = entry.parameter.data
    set_data(entry.parameter, value)
    return slot


class _Read(torch.autograd.Function):
    """Connects a copy of a resting parameter's value to the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
