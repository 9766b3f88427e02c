"""Values and gradients of sharded parameters: read from all ranks' shards on demand, and stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import LocalCollectives, Meeting
from ..support.torch_internals import DisableTorchFunctionSubclass, transform
from .agreement import compare_notes
from .backward import Backward
from .chunk import Entry
from .gradients import Gradients
from .isolation import isolated
from .sharded import (
    ResidencyError,
    ShardedTensor,
    absent_like,
    describe,
    owners_of,
    set_data,
    set_grad,
    sharded_tensor,
)
from .unit import Unit


class Access:
    """What an engine answers for its parameters, as their owner, while they are sharded."""

    entries: dict[int, Entry]  # by the `id` of the parameter
    collectives: LocalCollectives
    gradients: Gradients
    passes: Backward
    weights_changed: Callable[[list[Entry]], None]
    # of copies that users have: what it is of, an alias without memory that shares the count of
    # writes, and the count
    _watched: list[tuple[Tensor, Tensor, int]]

    def own_parameters(self) -> None:
        """From now on sharded parameters ask this engine."""
        self._watched = []
        for entry in self.entries.values():
            entry.owner, entry.parameter.zero3_entry = self, entry
            entry.absent_value = absent_like(entry.meta, entry.dtype, entry.chunk.device)
            with DisableTorchFunctionSubclass():
                set_grad(entry.parameter, None)  # of an earlier run: autograd would add to it

    # --------------------------------------------------------------------------------------- values

    def read(self, tensors: Iterable[Any]) -> dict[int, Tensor]:
        """Whole values, or gradients, in memory of their own, by the `id` of each tensor;
        collective, each unit is unsharded once.
        """
        found: dict[int, Tensor] = {}
        by_unit: dict[Unit, list[Any]] = {}
        with isolated():
            for each in tensors:
                if each.since is None:
                    by_unit.setdefault(each.zero3_entry.unit, []).append(each)
                else:
                    found[id(each)] = self.gradients.full(self._current(each))
            for unit, its in by_unit.items():
                full = unit.full_values or unit.values()
                # cloned: none is to keep the values of the whole unit alive
                found |= {id(each): full[each.zero3_entry.name].clone() for each in its}
                del full
        return found

    def write(self, to: Any, tensor: Tensor) -> None:
        """Store a whole value, or gradient, that all ranks have; local."""
        entry = to.zero3_entry
        if to.since is not None:
            self._current(to)
            with isolated():
                if entry.trained:
                    self.gradients.assign(entry, tensor)
            self.gradients.dropped.discard(entry.name)
            return
        tensor = tensor.detach().broadcast_to(entry.size)
        self.collectives.exchange_log.record_write(
            entry.name,
            "written" if self.passes.in_step else "stored",
            tensor.to(entry.chunk.device, entry.dtype),
        )
        with torch.no_grad():
            entry.part_of(entry.chunk.values).copy_(entry.cut(tensor))
        self.weights_changed([entry])

    def watch(self, of: Tensor, copy: Tensor) -> None:
        """Raise later if the user has written to ``copy``, which was read: nobody would store
        it.
        """
        if transform() is None and copy.layout == torch.strided and not copy.is_inference():
            alias = copy.detach()
            set_data(alias, alias.new_empty(0))
            self._watched.append((of, alias, alias._version))

    def require_unwritten(self) -> None:
        """Raise a ResidencyError if the user has written to a copy that was read."""
        watched, self._watched = self._watched, []
        for of, alias, version in watched:
            if alias._version != version:
                raise ResidencyError(
                    f"A tensor that was read from {describe(of)}, or assigned to it, was changed in"
                    " place since: nobody would store that. Change the parameter itself, under"
                    " `torch.no_grad()` (`parameter.copy_(...)`, `parameter[0] = ...`), or a"
                    " `.clone()`."
                )

    # ------------------------------------------------------------------------------------ gradients

    def gradient(self, parameter: Any) -> Tensor | None:
        """The :class:`~.sharded.ShardedTensor` of the reduced gradient, if the optimizers see
        one.
        """
        entry = parameter.zero3_entry
        self.passes.drop_failed()
        if not self.gradients.present(entry):
            return None
        return sharded_tensor(entry, entry.absent_value, entry.assigned)

    def _current(self, gradient: Any) -> Entry:
        entry = gradient.zero3_entry
        self.passes.reduce_held(entry.name)
        if gradient.since != entry.assigned:
            raise ResidencyError(
                f"This tensor was {describe(gradient)}, which was cleared or replaced since. Read"
                " `parameter.grad` again, or keep a copy (`.clone()`)."
            )
        return entry

    def set_gradient(self, parameter: Any, grad: Tensor | None) -> None:
        """Store a whole gradient that all ranks have, or clear it; local."""
        entry = parameter.zero3_entry
        if not entry.trained:
            self.gradients.dropped.discard(entry.name)
            return  # no optimizer would read it
        if grad is None:
            self.passes.require_ended(entry.name)
            self.gradients.clear(entry)
            return
        if isinstance(grad, ShardedTensor):
            if grad.zero3_entry is entry and grad.since == entry.assigned and not grad.views:
                return  # as after `parameter.grad *= 2`
            grad = grad.clone()
        with isolated():
            self.passes.reduce_held(entry.name)
            self.gradients.assign(entry, grad)
        entry.assigned += 1
        self.watch(sharded_tensor(entry, entry.absent_value, entry.assigned), grad)

    # ----------------------------------------------------------------------------------- `gathered`

    @contextmanager
    def gathered(self, parameters: Iterable[Any], modify: bool) -> Iterator[None]:
        """See :func:`gathered`, of this engine's parameters."""
        # once, however often it is named
        wanted = list(dict.fromkeys(p.zero3_entry for p in parameters))
        if self.collectives.alone:
            yield  # they are
            return
        units = list(dict.fromkeys(entry.unit for entry in wanted))
        # else ranks that have nothing to run take part
        if units and not units[0].pool.announce:
            self.collectives.meet(Meeting.GATHERED)
            compare_notes(self.collectives)  # what is read is put together of all ranks' parts
        for unit in units:
            unit.require_free()
        values = self.read(entry.parameter for entry in wanted)
        for entry in wanted:
            entry.parameter.__class__ = entry.cls_in_use
            set_data(entry.parameter, values[id(entry.parameter)])
            entry.seen = entry.parameter._version
        for unit in units:
            unit.has_own_values = True
        try:
            yield
            for entry in () if modify else wanted:
                if entry.parameter._version != entry.seen or entry.was_written():
                    raise ResidencyError(
                        f"Parameter {entry.name!r} was changed inside `gathered`, and the change is"
                        " lost. To store rank 0's values use"
                        " `with strategy.gathered(..., modify=True):`."
                    )
        finally:
            for entry in wanted:
                values[id(entry.parameter)] = entry.parameter.detach()
                if not self.passes.in_step:
                    set_grad(entry.parameter, None)  # of what was trained inside, after a run
                entry.aliases, entry.seen = [], entry.parameter._version
            for unit in units:
                unit.has_own_values = False
                unit.shard_parameters()
        for entry in wanted if modify else ():
            value = self.collectives.broadcast(values[id(entry.parameter)].contiguous())
            self.write(entry.parameter, value)


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
    parameters: Iterable[Any] = (
        what.parameters()
        if isinstance(what, nn.Module)
        else [what]
        if isinstance(what, Tensor)
        else what
    )
    with ExitStack() as stack:
        for owner, its in owners_of(parameters).items():
            stack.enter_context(owner.gathered(its, modify))
        yield
