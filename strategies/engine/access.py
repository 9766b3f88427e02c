"""Values of resting parameters: reads inside a step, full values on demand, writes that reach the
shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ..collectives import LocalCollectives, Meeting
from ..residency.apart import apart, connected
from ..residency.flat_gradient import weakly
from ..residency.home import Home, ResidencyError, about, is_sharded, owner_of, settle
from ..residency.numbers import take_back
from ..residency.resting import NO_GRAPH_TASK, graph_task, set_data, set_grad
from .agreement import compare_notes
from .clearing import clearing
from .gradients import Gradients
from .held_gradients import Held, HeldGradients
from .one_rank import WholeReducer
from .shards import Entry, FlatGroup
from .unit import Unit


class Access:
    """The home of all parameters of an engine; see :class:`~.residency.home.Home`."""

    in_step = False  # all ranks run the same code: a read may gather

    def __init__(
        self,
        units: list[Unit],
        collectives: LocalCollectives,
        gradients: Gradients,
        adopt_values: Callable[[], None],
        weights_changed: Callable[[list[Entry]], None],
        retire: Callable[[], None],
    ) -> None:
        self._units, self._collectives, self._gradients = units, collectives, gradients
        self._adopt_values, self._weights_changed, self.retire = (
            adopt_values,
            weights_changed,
            retire,
        )
        self._entries = {id(entry.parameter): entry for unit in units for entry in unit.entries}
        self.held = HeldGradients(gradients, collectives)
        for group in dict.fromkeys(group for unit in units for group in unit.groups):
            for flat in group.parameters:
                flat.asked = partial(weakly(self._before_reading), group)
                flat.writing = partial(weakly(self._before_writing), group)
                # users may have gradients of parameters, or have assigned some
                if isinstance(gradients.reducer, WholeReducer):
                    flat.cleared = partial(weakly(gradients.reducer.clear), group)
                    flat.written = weakly(self.held.follow_all)
        for entry in self._entries.values():
            label = f"{entry.name!r} (unit {units[entry.unit].name})"
            settle(entry.parameter, label, entry.cls, entry.dtype, self)
            with torch._C.DisableTorchFunctionSubclass():
                set_grad(entry.parameter, None)  # of an earlier run: autograd would add to it

    def _before_reading(self, group: FlatGroup, flat: nn.Parameter) -> None:
        """Users ask for the gradient of ``flat``, in ``group``: to change it perhaps, or to keep
        it.
        """
        reducer = self._gradients.reducer
        if not isinstance(reducer, WholeReducer):
            self.held.look_again()
        elif reducer.is_changed(group, flat):
            reducer.looked_at = True
            try:
                self._adopt_values()
                self.held.keep()
                self.held.adopt()
            finally:
                reducer.looked_at = False
        reducer.apart.clear()

    def _before_writing(self, group: FlatGroup) -> None:
        """Users write to flat values of ``group``, perhaps where they have seen a gradient."""
        for entry in self._gradients.uncut:
            if (
                entry.group is group
                and group.shows_gradients
                and not self._gradients.has_gradient(entry)
            ):
                raise ResidencyError(
                    "Values in `optimizer.param_groups` were changed while parameter"
                    f" {entry.name!r} has no gradient and others have one: they lie in one flat"
                    " tensor, which has one. Step the optimizer, or change the module's parameters"
                    " in `with strategy.gathered(module, modify=True):`."
                )

    def compare_notes(self) -> None:
        """See :meth:`~.residency.home.Home.compare_notes`."""
        compare_notes(self._collectives)

    def read(self, parameter: nn.Parameter) -> Tensor:
        """See :meth:`~.residency.home.Home.read`."""
        entry = self._entries[id(parameter)]
        spread = self._units[entry.unit].spread
        if not (self.in_step or graph_task() != NO_GRAPH_TASK or spread is not None):
            raise ResidencyError(
                f"The value of parameter {entry.name!r} is sharded over the ranks and was read"
                " outside a step. Read it in `training_step` (or another step), or inside `with"
                " trainer.strategy.gathered(module):` (to change it, `gathered(module,"
                " modify=True)`) on all ranks; to save the model call"
                " `trainer.save_checkpoint(path)` there."
            )
        differentiable = torch.is_grad_enabled() and parameter.requires_grad
        with apart():
            value = self.full_values([parameter])[0] if not spread else spread[entry.name]
            return connected(value, parameter) if differentiable else value.clone()

    def full_values(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """See :meth:`~.residency.home.Home.full_values`."""
        entries = [self._entries[id(p)] for p in parameters]
        values = {
            index: self._units[index].values()
            for index in dict.fromkeys(entry.unit for entry in entries)
        }
        return [values[entry.unit][entry.name] for entry in entries]

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """See :meth:`~.residency.home.Home.write`."""
        entry = self._entries[id(parameter)]
        value = value.detach().broadcast_to(entry.size)
        self._collectives.exchange_log.record_write(
            entry.name, value.to(entry.group.data.device, entry.dtype), self.in_step
        )
        entry.store(value, entry.group.data)
        self._weights_changed([entry])

    def age(self, parameter: nn.Parameter) -> tuple[int, int]:
        """See :meth:`~.residency.home.Home.age`."""
        entry = self._entries[id(parameter)]
        return entry.changed, entry.written

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """See :meth:`~.residency.home.Home.gradient`."""
        entry = self._entries[id(parameter)]
        self.held.keep(entry)
        with apart():
            self._gradients.settle(entry.name)
            if (to_none := clearing()) is not None and entry.trained:
                self.held.lose_graph(entry)
            if to_none is None or self.held.must_follow(entry):
                grad = self._gradients.full(entry, clears=to_none is not None)
            else:
                grad = self._gradients.cleared(entry, to_none)
        return None if grad is None else self.held.show(entry, grad)

    def set_gradient(self, parameter: nn.Parameter, grad: Tensor | None) -> None:
        """See :meth:`~.residency.home.Home.set_gradient`."""
        entry = self._entries[id(parameter)]
        self.held.keep(entry)
        entry.dropped = False
        if entry.trained:  # no optimizer would read another one's
            with apart():
                self._gradients.settle(entry.name)
                if not self.held.is_shown(entry, grad):  # as after `parameter.grad *= 2`
                    self._gradients.reducer.retire(entry)
                self._gradients.assign(entry, grad)
            entry.assigned += 1
            if grad is not None:
                self.held.assigned(entry, grad)

    def keeper_of(self, held: Held) -> HeldGradients | None:
        """See :meth:`~.residency.home.Home.keeper_of`. An earlier engine's: it is of before
        `add_param_group`.
        """
        return self.held if self._entries[id(held.entry.parameter)] is held.entry else None

    @contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter], modify: bool) -> Iterator[None]:
        """See :func:`gathered`, of this engine's parameters."""
        found = {id(p): self._entries[id(p)] for p in parameters}  # once, however often it is named
        wanted = [entry for entry in found.values() if not self._units[entry.unit].whole]
        units = list(dict.fromkeys(self._units[entry.unit] for entry in wanted))
        if units and units[0].announce is None:  # else ranks that have nothing to run take part
            self._collectives.meet(Meeting.GATHERED)
            compare_notes(self._collectives)  # what is gathered is put together of all ranks' parts
        values = {}
        with apart():
            for unit in units:
                full = unit.values()
                values.update(
                    {e.name: full[e.name].clone() for e in wanted if e.unit == unit.index}
                )
        for unit in units:
            _require_unused(unit, wanted)
        aliased = [about(entry.parameter).aliased for entry in wanted]
        slots = [_lend(entry, values[entry.name]) for entry in wanted]
        for unit in units:
            unit.lent = True
        try:
            yield
            if not modify:
                _require_unwritten(wanted)
        finally:
            for entry, slot, was in zip(wanted, slots, aliased, strict=True):
                values[entry.name] = entry.parameter.detach()
                set_data(entry.parameter, slot)
                about(entry.parameter).aliased = was  # what was read meanwhile is no slot
            for unit in units:
                unit.lent = False
                unit.rest()
        for entry in wanted if modify else ():
            self.write(
                entry.parameter, self._collectives.broadcast(values[entry.name].contiguous())
            )


@contextmanager
def gathered(
    what: nn.Module | nn.Parameter | Iterable[nn.Parameter], modify: bool
) -> Iterator[None]:
    """Inside, the parameters are ordinary and full; collective at entry, and at exit with
    ``modify``.

    At exit rank 0's values are stored with ``modify``, whatever the other ranks wrote; else a write
    is an error. Those of an earlier run come from its engine; parameters that are not sharded are
    left alone.
    """
    parameters = (
        what.parameters()
        if isinstance(what, nn.Module)
        else [what]
        if isinstance(what, Tensor)
        else what
    )
    by_home: dict[Home, list[nn.Parameter]] = {}
    for parameter in parameters:
        if is_sharded(parameter):
            by_home.setdefault(owner_of(parameter), []).append(parameter)
    with ExitStack() as stack:
        for home, its in by_home.items():
            stack.enter_context(home.gathered(its, modify))
        yield


def _require_unused(unit: Unit, wanted: list[Entry]) -> None:
    if unit.pins or unit.lent:
        name = next(entry.name for entry in wanted if entry.unit == unit.index)
        raise ResidencyError(
            f"Parameter {name!r} has its full value here, in a step or forward that uses it or"
            " another `gathered`, and is not gathered once more: read it, or change it in place,"
            " as it is."
        )


def _require_unwritten(wanted: list[Entry]) -> None:
    for entry in wanted:
        if entry.parameter._version != entry.seen:
            raise ResidencyError(
                f"Parameter {entry.name!r} was changed inside `gathered`, and the change is lost."
                " To store rank 0's values use `with strategy.gathered(..., modify=True):`."
            )


def _lend(entry: Entry, value: Tensor) -> Tensor:
    """Make the parameter an ordinary one that holds ``value``; returns its place in the slot."""
    take_back(entry.parameter)
    entry.parameter.__class__ = entry.cls_while_used  # which counts writes to `.data`, too
    # past the class, for which the user would have read it
    slot = Tensor.data.__get__(entry.parameter)
    set_data(entry.parameter, value)
    entry.seen = entry.parameter._version
    return slot
