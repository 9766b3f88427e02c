"""Optimizers on shards: how each steps, and what an edit of ``optimizer.param_groups`` does.

Between edits a group holds flat tensors. When a user has put parameters of the module among them,
or has removed some, the model is sharded anew for the groups as they are now; optimizer state and
gradients move to the new shards.
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
from .classify import Stepping, SteppingTrial
from .guards import guard_optimizers
from .lbfgs import LongVector
from .whole_parameters import OwnedTensors

_State = dict[Tensor, dict[str, Any]]  # the state of an optimizer


class ParamGroups:
    """Keeps the shards of an engine in step with the groups of its optimizers.

    Args:
        optimizers: the optimizers of the engine, in its order.
        shard: builds an engine for groups that hold the module's own parameters; it replaces the
            engine before it.
        device: device of the shards.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        shard: Callable[[], Zero3Engine],
        device: torch.device,
    ) -> None:
        self._optimizers, self._shard = optimizers, shard
        self._trials = [SteppingTrial(optimizer, device) for optimizer in optimizers]
        self._steppings = [trial.stepping for trial in self._trials]
        self._substitutions: dict[int, OwnedTensors | LongVector] = {}
        # index of an optimizer -> name of a parameter added to it since the last backward
        self._additions: dict[int, str] = {}

    def start(self, engine: Zero3Engine, states: Sequence[Mapping[str, dict[str, Any]]]) -> None:
        """Let the optimizers step on the shards of ``engine``.

        Args:
            engine: the engine that was built for the optimizers.
            states: state of each optimizer by parameter name that its constructor made (Adagrad's
                does).
        """
        guard_optimizers(self._optimizers, engine)
        for index, optimizer in enumerate(self._optimizers):
            if self._steppings[index] is Stepping.ELEMENTS:
                take_over_state(engine, index, optimizer, states[index])
            elif self._steppings[index] is Stepping.TENSORS:
                self._substitutions[index] = OwnedTensors(engine, index, optimizer, states[index])
            else:
                self._substitutions[index] = LongVector(engine, index, optimizer)

    def owned_tensors(self, index: int) -> OwnedTensors | None:
        """Return the whole tensors that optimizer ``index`` steps on; None if it steps on shards.

        Raises:
            ValueError: the optimizer is LBFGS, whose history belongs to no parameter and cannot be
                saved.
        """
        substitution = self._substitutions.get(index)
        if isinstance(substitution, LongVector):
            raise ValueError(
                "The state of LBFGS cannot be saved or loaded with Zero3Strategy. Save the weights"
                " alone: `ModelCheckpoint(save_weights_only=True)`, `trainer.save_checkpoint(path,"
                " weights_only=True)`."
            )
        return substitution

    def apply_edits(self, engine: Zero3Engine) -> Zero3Engine:
        """Return an engine for the groups as they are now; collective if a user has edited them.

        Without an edit this is ``engine`` itself.

        Raises:
            ValueError: new options need whole parameters (:meth:`SteppingTrial.try_new_options`),
                parameters have other names than when they were sharded, or an optimizer is LBFGS.
        """
        for trial in self._trials:
            trial.try_new_options()
        if not self._has_edits(engine):
            return engine
        engine.structure.check()
        renamed = sorted(
            {name for name, _ in engine.structure.model.named_parameters()} - _sharded_names(engine)
        )
        if renamed:
            raise ValueError(
                "Param groups were edited after parameters had been given other names, as pruning"
                f" does: {', '.join(map(repr, renamed))}. Edit the groups before, or prune before"
                " `trainer.fit`."
            )
        self._insert_parameters(engine)
        return self._regroup(engine)

    @contextmanager
    def expose_parameters(self, engine: Zero3Engine) -> Iterator[None]:
        """Let the groups hold the module's own parameters inside of a `with`; collective.

        All ranks may read and compare these parameters. An edit takes effect with the next
        :meth:`apply_edits`.
        """
        self._insert_parameters(engine)
        try:
            yield
        finally:
            self._restore_flats(engine)

    def require_cleared(self, engine: Zero3Engine) -> None:
        """Require before a backward that gradients from before an edit have been cleared.

        Raises:
            ValueError: an optimizer still has gradients from before parameters were added to it;
                the gradients that these would have are not known.
        """
        if self._additions:
            engine.adopt_gradients()  # the user may have cleared gradients one by one
        for flat in engine.groups:
            if (
                flat.key.optimizer in self._additions
                and flat.shows_gradients
                and not engine.reducer.is_zero(flat)
            ):
                raise ValueError(
                    f"Parameter {self._additions[flat.key.optimizer]!r} was added to an optimizer"
                    " whose gradients have not been cleared since; its own gradients from before"
                    " are not known. Call `zero_grad()` after `add_param_group`."
                )
        self._additions = {}

    def _has_edits(self, engine: Zero3Engine) -> bool:
        for index, optimizer in enumerate(self._optimizers):
            expected: list[list[int]] = [[] for _ in engine.optimizer_names[index]]
            for flat in _flats_of(engine, index):
                assert flat.key.group is not None
                expected[flat.key.group] += [id(p) for p in flat.parameters]
            found = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
            if list(map(sorted, found)) != list(map(sorted, expected)):
                return True
        return False

    def _insert_parameters(self, engine: Zero3Engine) -> None:
        """Let each group hold the parameters of its flat tensors, then those added to it."""
        by_name = {entry.name: entry.parameter for unit in engine.units for entry in unit.entries}
        for index, optimizer in enumerate(self._optimizers):
            number = {
                id(p): flat.key.group for flat in _flats_of(engine, index) for p in flat.parameters
            }
            for group in optimizer.param_groups:
                known = dict.fromkeys(number[id(p)] for p in group["params"] if id(p) in number)
                added = [p for p in group["params"] if id(p) not in number]
                group["params"][:] = [
                    by_name[name]
                    for g in known
                    if g is not None
                    for name in engine.optimizer_names[index][g]
                ] + added

    def _restore_flats(self, engine: Zero3Engine) -> None:
        """Put the flat tensors back if the groups hold the parameters that the engine sharded."""
        names = {id(entry.parameter): entry.name for unit in engine.units for entry in unit.entries}
        found = [
            [[names.get(id(p)) for p in group["params"]] for group in o.param_groups]
            for o in self._optimizers
        ]
        if found == engine.optimizer_names:
            attach(engine.groups, self._optimizers)

    def _regroup(self, engine: Zero3Engine) -> Zero3Engine:
        """Shard the model anew for the groups, which hold parameters of the module.

        For a while there are two sets of shards and of optimizer state in memory.
        """
        if Stepping.MODEL in self._steppings:
            raise ValueError(
                "Param groups cannot be edited beside LBFGS: its history is of the parameters that"
                " it has had."
            )
        before = [dict(optimizer.state) for optimizer in self._optimizers]
        engine.adopt_gradients()
        engine.gradients.require_complete(engine.groups)
        compare_notes(engine.collectives, engine.gradients.assigned_sums())
        new = self._shard()
        guard_optimizers(self._optimizers, new)
        for index, optimizer in enumerate(self._optimizers):
            if self._steppings[index] is Stepping.ELEMENTS:
                _move_state(engine, new, index, optimizer, before[index])
            else:
                self._substitute_anew(engine, new, index, _state_of_added(new, before[index]))
            known = {name for names in engine.optimizer_names[index] for name in names}
            for name in (name for names in new.optimizer_names[index] for name in names):
                if name not in known:
                    self._additions[index] = name
        _move_gradients(engine, new)
        return new

    def _substitute_anew(
        self, old: Zero3Engine, new: Zero3Engine, index: int, state: dict[str, dict[str, Any]]
    ) -> None:
        before, optimizer = self._substitutions[index], self._optimizers[index]
        assert isinstance(before, OwnedTensors)
        before.close()
        old_state = before.state
        after = self._substitutions[index] = OwnedTensors(new, index, optimizer, {})
        for unit in old.units:
            mine = {
                entry.name: _copy_to_cpu(old_state[entry.name])
                for entry in unit.entries
                if entry.name in old_state
            }
            for theirs in new.collectives.all_gather_object(mine):
                state |= {
                    name: value for name, value in theirs.items() if name in after.owned_parameters
                }
        after.set_state(state)


def _copy_to_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.cpu() if isinstance(value, Tensor) else value for key, value in state.items()
    }


def _sharded_names(engine: Zero3Engine) -> set[str]:
    return {entry.name for unit in engine.units for entry in unit.entries}


def _flats_of(engine: Zero3Engine, index: int) -> list[FlatGroup]:
    return [flat for flat in engine.groups if flat.key.optimizer == index]


def _move_gradients(old: Zero3Engine, new: Zero3Engine) -> None:
    for before in old.units:
        present = [entry for entry in before.trained if old.gradients.has_gradient(entry)]
        full = before.full(lambda flat: flat.grad) if present else {}
        for entry in present:
            new.access.set_gradient(entry.parameter, full[entry.name])
    new.adopt_gradients()


def _move_state(
    old: Zero3Engine, new: Zero3Engine, index: int, optimizer: Optimizer, before: _State
) -> None:
    state = {**flat_state(old, index, before), **_state_of_added(new, before)}
    targets = {
        id(source): target for source, target in take_over_state(new, index, optimizer, state)
    }
    # hazard: each kind is one collective below, so all ranks must have them in the same order.
    kinds: dict[tuple[Unit, Flats, torch.dtype], list[SlicedTensor]] = {}
    for piece in tensors_in(state, SlicedTensor):
        kinds.setdefault((piece.place.unit, piece.flats, piece.dtype), []).append(piece)
    for (unit, flats, dtype), pieces in kinds.items():
        full = unit.full(flats, dtype)
        for piece in pieces:
            if id(piece) in targets:  # this rank owns a part of it
                targets[id(piece)].fill(full[piece.place.entry.name])


def _state_of_added(engine: Zero3Engine, before: _State) -> dict[str, dict[str, Any]]:
    """Return the state, by name, that an optimizer's `add_param_group` made for new parameters.

    Its tensors are whole, as the parameters are not sharded yet.
    """
    names = {id(entry.parameter): entry.name for unit in engine.units for entry in unit.entries}
    return {names[id(p)]: state for p, state in before.items() if id(p) in names}
