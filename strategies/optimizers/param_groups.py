"""What each optimizer steps on, and parameters that come to an optimizer during training.

Param groups hold the module's own parameters. They may be moved between groups and optimizers at
any time; when one is added that no optimizer had, the model is sharded anew, as gradients are kept
for the others alone. Optimizer state and gradients move to the new shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from ..engine import OptimizerStep, StandIns, State, Zero3Engine, compare_notes
from .classify import ELEMENTWISE, require_separate
from .host_steps import FUSED, HostShards
from .lbfgs import Themselves
from .whole_parameters import WholeParameters


class ParamGroups:
    """Keeps the shards of an engine in step with the groups of its optimizers.

    Args:
        optimizers: the optimizers of the engine, in its order.
        shard: builds an engine for the groups as they are; it replaces the engine before it.
        device: device of the shards.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        shard: Callable[[], Zero3Engine],
        device: torch.device,
    ) -> None:
        self._optimizers, self._shard = optimizers, shard
        for optimizer in optimizers:
            if type(optimizer) not in ELEMENTWISE and not isinstance(optimizer, LBFGS):
                require_separate(optimizer, device)

    def start(self, engine: Zero3Engine, states: Sequence[Mapping[str, State]] = ()) -> None:
        """Let the optimizers step on what they can step on.

        Args:
            engine: the engine that was built for the optimizers.
            states: state of each optimizer by parameter name, in place of what its constructor has
                made.
        """
        engine.collectives.exchange_log.settings = partial(_list_settings, self._optimizers)
        by_name = {entry.name: entry.parameter for entry in engine.entries.values()}
        for index, optimizer in enumerate(self._optimizers):
            step = engine.steps[optimizer]
            step.stand_ins = self._stand_ins(engine, index)
            for name, state in states[index].items() if states else ():
                optimizer.state[by_name[name]] = state

    def _stand_ins(self, engine: Zero3Engine, index: int) -> StandIns:
        optimizer = self._optimizers[index]
        if type(optimizer) in ELEMENTWISE:
            if engine.host is not None and type(optimizer) in FUSED:
                return HostShards(engine, engine.steps[optimizer])
            return StandIns(engine)
        if isinstance(optimizer, LBFGS):
            return Themselves(engine)
        return WholeParameters(engine, optimizer)

    def apply_edits(self, engine: Zero3Engine) -> Zero3Engine:
        """Return an engine for the groups as they are now: ``engine`` itself unless a parameter was
        added that no optimizer had. Collective then.
        """
        members = [p for o in self._optimizers for group in o.param_groups for p in group["params"]]
        if engine.trained_ids.issuperset(map(id, members)):
            return engine
        engine.structure.check()
        engine.passes.reduce_held()
        compare_notes(engine.collectives)
        before = [engine.steps[optimizer] for optimizer in self._optimizers]
        for step in before:
            step.close()
        new = self._shard()
        self.start(new)
        for old, optimizer in zip(before, self._optimizers, strict=True):
            _move_state(engine, old.stand_ins, old.state, new.steps[optimizer])
        _move_gradients(engine, new)
        return new


def _list_settings(optimizers: Iterable[Optimizer]) -> list[str]:
    """List the options of all param groups that are numbers, or tuples of them, in words.

    Tensors are left out: to read one, the host would wait for the device.
    """
    return [
        f"{option!r} = {value} in param group {number} of {type(optimizer).__name__}"
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for option, value in group.items()
        if all(
            isinstance(each, int | float)
            for each in (value if isinstance(value, tuple) else (value,))
        )
    ]


def whole_parameters(step: OptimizerStep) -> WholeParameters | None:
    """The whole parameters that an optimizer steps on; None if it steps on shards.

    Raises:
        ValueError: the optimizer is LBFGS, whose history is of all parameters together and cannot
            be saved.
    """
    if isinstance(step.stand_ins, Themselves):
        raise ValueError(
            "The state of LBFGS cannot be saved or loaded with Zero3Strategy. Save the weights"
            " alone: `ModelCheckpoint(save_weights_only=True)`, `trainer.save_checkpoint(path,"
            " weights_only=True)`."
        )
    return step.stand_ins if isinstance(step.stand_ins, WholeParameters) else None


def _move_state(
    engine: Zero3Engine, old: StandIns, state: dict[Any, State], step: OptimizerStep
) -> None:
    """Give ``step`` the ``state`` of the stand-ins before, which ``engine`` had."""
    names = old.names_with_state(state)
    for entry in chain(*step.entries()):
        before = engine.entries[id(entry.parameter)]  # pruning has given it another name since
        if before.name in names:
            step.stand_ins.cut_state(entry, old.whole_state(before, state), step.state)


def _move_gradients(old: Zero3Engine, new: Zero3Engine) -> None:
    for before in old.units:
        present = [entry for entry in before.trained if old.gradients.has_gradient(entry)]
        full: Mapping[str, Any] = before.gradients() if present else {}
        for entry in present:
            new.set_gradient(entry.parameter, full[entry.name])
