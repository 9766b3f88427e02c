"""Optimizers and their groups on shards: how each steps, and what follows when
``optimizer.param_groups`` are edited.

Between edits a group holds flat tensors. When parameters of the module turn up among them, or some
are gone, the model is sharded anew for the groups as they are now; optimizer state and gradients
move along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine import Zero3Engine, compare_notes
from ..engine.shards import FlatGroup, attach
from ..engine.unit import Unit
from ..state_dicts.gather import tensors_in
from ..state_dicts.optimizer_state import flat_state, take_over_state
from ..state_dicts.slices import Flats, SlicedTensor
from .classify import Stepping, Tried
from .guards import protect
from .lbfgs import LongVector
from .substituted_step import Substitution
from .whole_parameters import OwnedTensors

_State = dict[Tensor, dict[str, Any]]  # an optimizer's


class ParamGroups:
    """Keeps the shards of an engine in step with the groups of its optimizers.

    Args:
        optimizers: as given to the engine.
        shard: builds an engine for groups that hold the module's own parameters, in the place of
            the one before.
        device: of the shards.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        shard: Callable[[], Zero3Engine],
        device: torch.device,
    ) -> None:
        self._optimizers, self._shard = optimizers, shard
        self._tried = [Tried(optimizer, device) for optimizer in optimizers]
        self._stepping = [tried.stepping for tried in self._tried]
        self._substitutions: dict[int, Substitution] = {}
        self._added: dict[
            int, str
        ] = {}  # optimizer -> a parameter that it has since the last backward

    def start(self, engine: Zero3Engine, states: Sequence[Mapping[str, dict[str, Any]]]) -> None:
        """Let the optimizers step on the shards of ``engine``.

        Args:
            engine: built for them.
            states: of each optimizer, by parameter name, which it made with its parameters (Adagrad
                does).
        """
        protect(self._optimizers, engine)
        for index, optimizer in enumerate(self._optimizers):
            if self._stepping[index] is Stepping.ELEMENTS:
                take_over_state(engine, index, optimizer, states[index])
            elif self._stepping[index] is Stepping.TENSORS:
                self._substitutions[index] = OwnedTensors(engine, index, optimizer, states[index])
            else:
                self._substitutions[index] = LongVector(engine, index, optimizer)

    def owned(self, index: int) -> OwnedTensors | None:
        """How optimizer ``index`` steps, if on whole tensors.

        Raises:
            ValueError: it is LBFGS, whose history belongs to no parameter and cannot be saved.
        """
        found = self._substitutions.get(index)
        if isinstance(found, LongVector):
            raise ValueError(
                "The state of LBFGS cannot be saved or loaded with Zero3Strategy. Save the weights"
                " alone: `ModelCheckpoint(save_weights_only=True)`, `trainer.save_checkpoint(path,"
                " weights_only=True)`."
            )
        return found

    def follow(self, engine: Zero3Engine) -> Zero3Engine:
        """The engine for the groups as they are now: ``engine`` itself unless they were edited;
        collective then.
        """
        for tried in self._tried:
            tried.follow()
        if not self._edited(engine):
            return engine
        engine.structure.check()
        renamed = sorted(
            {name for name, _ in engine.structure.model.named_parameters()} - _names(engine)
        )
        if renamed:
            raise ValueError(
                "Param groups were edited after parameters had been given other names, as pruning"
                f" does: {', '.join(map(repr, renamed))}. Edit the groups before, or prune before"
                " `trainer.fit`."
            )
        self._show(engine)
        return self._regroup(engine)

    @contextmanager
    def shown(self, engine: Zero3Engine) -> Iterator[None]:
        """Inside, the groups hold the module's own parameters, which all ranks may read and
        compare; collective.

        What was edited has its effect with the next :meth:`follow`.
        """
        self._show(engine)
        within, engine.access.in_step = engine.access.in_step, True
        try:
            yield
        finally:
            engine.access.in_step = within
            self._hide(engine)

    def require_cleared(self, engine: Zero3Engine) -> None:
        """To be called before a backward.

        Raises:
            ValueError: gradients from before an edit are kept, and what the added parameters would
                have is not known.
        """
        if self._added:
            engine.adopt_gradients()  # they may have been cleared one by one
        for flat in engine.groups:
            if (
                flat.key.optimizer in self._added
                and flat.shows_gradients
                and not engine.reducer.is_zero(flat)
            ):
                raise ValueError(
                    f"Parameter {self._added[flat.key.optimizer]!r} was added to an optimizer whose"
                    " gradients have not been cleared since; its own gradients from before are not"
                    " known. Call `zero_grad()` after `add_param_group`."
                )
        self._added = {}

    def _edited(self, engine: Zero3Engine) -> bool:
        for index, optimizer in enumerate(self._optimizers):
            held: list[list[int]] = [[] for _ in engine.optimizer_names[index]]
            for flat in _flats(engine, index):
                held[flat.key.group] += [id(p) for p in flat.parameters]
            inside = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
            if list(map(sorted, inside)) != list(map(sorted, held)):
                return True
        return False

    def _show(self, engine: Zero3Engine) -> None:
        """Let each group hold the parameters that it stands for, then those that were added to
        it.
        """
        by_name = {entry.name: entry.parameter for unit in engine.units for entry in unit.entries}
        for index, optimizer in enumerate(self._optimizers):
            number = {
                id(p): flat.key.group for flat in _flats(engine, index) for p in flat.parameters
            }
            for group in optimizer.param_groups:
                known = dict.fromkeys(number[id(p)] for p in group["params"] if id(p) in number)
                added = [p for p in group["params"] if id(p) not in number]
                group["params"][:] = [
                    by_name[name] for g in known for name in engine.optimizer_names[index][g]
                ] + added

    def _hide(self, engine: Zero3Engine) -> None:
        """Put the flat tensors back, if the groups still have the members that the engine has
        sharded.
        """
        names = {id(entry.parameter): entry.name for unit in engine.units for entry in unit.entries}
        found = [
            [[names.get(id(p)) for p in group["params"]] for group in o.param_groups]
            for o in self._optimizers
        ]
        if found == engine.optimizer_names:
            attach(engine.groups, self._optimizers)

    def _regroup(self, engine: Zero3Engine) -> Zero3Engine:
        # For a while there are two sets of shards and of optimizer state.
        if Stepping.MODEL in self._stepping:
            raise ValueError(
                "Param groups cannot be edited beside LBFGS: its history is of the parameters that"
                " it has had."
            )
        before = [dict(optimizer.state) for optimizer in self._optimizers]
        engine.adopt_gradients()
        engine.gradients.require_complete(engine.groups)
        compare_notes(engine.collectives, engine.gradients.assigned_sums())
        engine.reducer.hide()
        new = self._shard()
        protect(self._optimizers, new)
        for index, optimizer in enumerate(self._optimizers):
            if self._stepping[index] is Stepping.ELEMENTS:
                _move_state(engine, new, index, optimizer, before[index])
            else:
                self._substitute_anew(engine, new, index, _made_when_added(new, before[index]))
            known = {name for names in engine.optimizer_names[index] for name in names}
            for name in (
                name for names in new.optimizer_names[index] for name in names if name not in known
            ):
                self._added[index] = name
        _move_gradients(engine, new)
        return new

    def _substitute_anew(
        self, old: Zero3Engine, new: Zero3Engine, index: int, state: dict[str, dict[str, Any]]
    ) -> None:
        before, optimizer = self._substitutions[index], self._optimizers[index]
        before.close()
        kept = before.state
        after = self._substitutions[index] = OwnedTensors(new, index, optimizer, {})
        for unit in old.units:
            mine = {
                entry.name: _on_cpu(kept[entry.name])
                for entry in unit.entries
                if entry.name in kept
            }
            for theirs in new.collectives.all_gather_object(mine):
                state |= {name: value for name, value in theirs.items() if name in after.mine}
        after.set_state(state)


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()
    }


def _names(engine: Zero3Engine) -> set[str]:
    return {entry.name for unit in engine.units for entry in unit.entries}


def _flats(engine: Zero3Engine, index: int) -> list[FlatGroup]:
    return [flat for flat in engine.groups if flat.key.optimizer == index]


def _move_gradients(old: Zero3Engine, new: Zero3Engine) -> None:
    for before in old.units:
        present = [entry for entry in before.trained if old.gradients.has_gradient(entry)]
        full = Unit.full(before, lambda flat: flat.grad) if present else {}
        for entry in present:
            new.access.set_gradient(entry.parameter, full[entry.name])
    new.adopt_gradients()
    new.reducer.show(bytes(new.gradients.used), new.gradients.graphs)


def _move_state(
    old: Zero3Engine, new: Zero3Engine, index: int, optimizer: Optimizer, before: _State
) -> None:
    state = {**flat_state(old, index, before), **_made_when_added(new, before)}
    targets = {
        id(source): target for source, target in take_over_state(new, index, optimizer, state)
    }
    kinds: dict[
        tuple[Unit, Flats, torch.dtype], list[SlicedTensor]
    ] = {}  # in the same order on all ranks
    for piece in tensors_in(state, SlicedTensor):
        kinds.setdefault((piece.place.unit, piece.flats, piece.dtype), []).append(piece)
    for (unit, flats, dtype), pieces in kinds.items():
        # not WholeUnit's, which would look at its former parameters
        full = Unit.full(unit, flats, dtype)
        for piece in pieces:
            if id(piece) in targets:  # this rank owns a part of it
                targets[id(piece)].fill(full[piece.place.entry.name])


def _made_when_added(engine: Zero3Engine, before: _State) -> dict[str, dict[str, Any]]:
    """By name, whole: the state that an optimizer's own `add_param_group` made for parameters that
    it did not have.
    """
    names = {id(entry.parameter): entry.name for unit in engine.units for entry in unit.entries}
    return {names[id(p)]: state for p, state in before.items() if id(p) in names}
