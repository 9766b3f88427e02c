"""An optimizer's step: what stands in its param groups for the parameters, and its state.

Between steps the groups hold the module's own parameters, and ``optimizer.state`` is of these. In a
step they hold what the optimizer can step on, usually this rank's shards::

    group["params"]     w0, w1 (sharded)  -> step: w0's part, w1's part [elements] ->  w0, w1
    optimizer.state     {w0: whole, ...}  -> step: {w0's part: its part, ...}      ->  {w0: whole}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..support import profile_range
from .chunk import Chunk, Entry
from .unit import Exchange

State = dict[str, Any]  # an optimizer's, of one parameter

# What torch's elementwise optimizers keep one number of for a parameter.
SCALARS = frozenset({"step", "mu_product", "eta", "mu"})


class StandIns:
    """What an optimizer steps on in the place of parameters: this rank's shards of them.

    Right for optimizers that update each element by itself; others have classes of their own.
    """

    # whether the optimizer needs them before its closure has made gradients, too
    needed_before_closure = False
    # whether they are stepped on when the optimizer's step is over, which has nothing to step on
    steps_later = False

    def __init__(self, engine: Any) -> None:
        self.engine = engine  # the :class:`~.engine.Zero3Engine`

    def of(self, groups: Sequence[Sequence[Entry]]) -> list[list[nn.Parameter]]:
        """What stands for the parameters of each group."""
        return [[entry.shard for entry in entries] for entries in groups]

    def load(self, groups: Sequence[Sequence[Entry]]) -> None:
        """Give the stand-ins their values and gradients; collective."""
        used, gradients = self.engine.gradients.used, dict[Chunk, Tensor]()
        entries = list(chain(*groups))
        for chunk in dict.fromkeys([entry.chunk for entry in entries]):
            chunk.begin_write()
            if any(used[chunk.numbers]):
                gradients[chunk] = chunk.room_for_gradients()
        for entry in entries:
            has_one = used[entry.number]
            entry.shard.grad = entry.part_of(gradients[entry.chunk]) if has_one else None

    def store(self, groups: Sequence[Sequence[Entry]]) -> None:
        """The optimizer has stepped: the values become the module's, and gradients that it has
        cleared are gone; collective.
        """
        gradients = self.engine.gradients
        for entry in chain(*groups):
            if entry.shard.grad is None and gradients.has_gradient(entry):
                gradients.clear(entry)
            entry.shard.grad = None

    def finish(self) -> None:
        """Wait until all steps are done."""

    def drop(self) -> None:
        """A step has failed: nothing of it is kept but what is written to the shards."""

    def convert_loss(self, value: Any) -> Any:
        """What the optimizer gets for the ``value`` of its closure; collective."""
        return value

    def names_with_state(self, state: dict[Any, State]) -> set[str]:
        """Of which parameters the optimizer has ``state``; collective."""
        return {entry.name for entry in self.engine.entries.values() if state.get(entry.shard)}

    def whole_state(self, entry: Entry, state: dict[Any, State]) -> State:
        """The state of ``entry``, tensors of its shape in memory of their own; collective."""
        return {
            key: entry.unit.whole(entry, value)
            if isinstance(value, Tensor) and value.dim() == 1
            else value.clone()
            if isinstance(value, Tensor)
            else value
            for key, value in state.get(entry.shard, {}).items()
        }

    def cut_state(self, entry: Entry, whole: State, state: dict[Any, State]) -> None:
        """Keep this rank's part of the ``whole`` state of ``entry``; local."""
        state[entry.shard] = {key: _cut(entry, key, value) for key, value in whole.items()}


def _cut(entry: Entry, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if key in SCALARS or (not value.dim() and entry.size):
        return value.clone()
    return entry.cut(value.to(entry.shard.device)).clone()


class StateOfParameters(MutableMapping):
    """``optimizer.state`` between steps: by parameter of the module, and whole; collective to read.

    What was read or set is cut into shards when the optimizer steps next.
    """

    def __init__(self, step: OptimizerStep) -> None:
        self._step = step
        self.given: dict[Any, State] = {}  # parameter -> state that users have, or gave

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, Tensor):
            return self._step.state[key]
        if key not in self.given:
            if (entry := self._step.entry_of(key)) is None:
                self.given[key] = {}
            else:
                self._step.engine.collectives.meet(entry.unit.labels[Exchange.STATE])
                self.given[key] = self._step.stand_ins.whole_state(entry, self._step.state)
        return self.given[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        (self.given if isinstance(key, Tensor) else self._step.state)[key] = value

    def __delitem__(self, key: Any) -> None:
        if isinstance(key, Tensor):
            self.given[key] = {}
        else:
            del self._step.state[key]

    def __iter__(self) -> Iterator[Any]:
        step = self._step
        known = step.stand_ins.names_with_state(step.state)
        for p in [p for group in step.optimizer.param_groups for p in group["params"]]:
            entry = step.entry_of(p)
            if self.given[p] if p in self.given else entry is not None and entry.name in known:
                yield p
        yield from [key for key in step.state if not isinstance(key, Tensor)]

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, key: Any) -> bool:
        return (
            any(key is each for each in self)
            if isinstance(key, Tensor)
            else key in self._step.state
        )

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of ``key``, or ``default`` where there is none."""
        return self[key] if key in self else default

    def clear(self) -> None:
        """All parameters begin anew; local."""
        self.given.clear()
        self._step.state.clear()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict, dict(self))

    def cut(self) -> None:
        """Give what users have read or set to the stand-ins; local."""
        given, self.given = self.given, {}
        for key, whole in given.items():
            found = self._step.entry_of(key)
            if found is None:
                self.given[key] = whole  # of a parameter that is not sharded for it yet
            else:
                self._step.stand_ins.cut_state(found, whole, self._step.state)


class OptimizerStep:
    """Puts stand-ins into an optimizer's groups for the time of a step.

    While its closure runs the model, the groups hold the module's parameters.
    """

    def __init__(self, engine: Any, optimizer: Optimizer) -> None:
        self.engine, self.optimizer = engine, optimizer
        self.stand_ins = StandIns(engine)
        self._state: dict[Any, State] = optimizer.state
        self._parameters: list[list[nn.Parameter]] = []  # of each group, while others are there
        self._groups: list[list[Entry]] = []  # the same
        self._nested = 0  # calls of `super().step()` within `step()`, which have hooks too
        self.is_closed = False  # the optimizer was let go
        self.state_of_parameters = StateOfParameters(self)
        for key in [key for key in self.state if isinstance(key, Tensor)]:
            self.state_of_parameters.given[key] = self.state.pop(key)
        optimizer.state = self.state_of_parameters  # type: ignore[assignment]
        self._first = optimizer.register_step_pre_hook(self._before)
        self._last = optimizer.register_step_post_hook(self._after)
        self._step: Any = optimizer.step
        self._wrap()

    def _wrap(self) -> None:
        """Wrap the optimizer's ``step``: torch calls no post hook after one that raises."""

        @wraps(getattr(self._step, "__func__", self._step))
        def wrapped(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # All other hooks run before the first of ours, and after the second: users see groups
            # as they are between steps.
            before: Any = optimizer._optimizer_step_pre_hooks  # ordered, as the others
            after: Any = optimizer._optimizer_step_post_hooks
            if not self.is_closed:  # a learning-rate scheduler may have wrapped this since
                before.move_to_end(self._first.id)
                after.move_to_end(self._last.id, last=False)
            try:
                return self._step(*args, **kwargs)
            except BaseException:
                self.abandon()
                raise

        self._wrapped = MethodType(wrapped, self.optimizer)
        self.optimizer.step = self._wrapped  # type: ignore[method-assign]

    def close(self) -> None:
        """Let go of the optimizer, which keeps the state that belongs to no parameter, or to new
        ones.
        """
        if self.is_closed:
            return
        self.abandon()
        self.take_state()
        self._first.remove()
        self._last.remove()
        if self.optimizer.step is self._wrapped:
            self.optimizer.step = self._step  # type: ignore[method-assign]
        self.is_closed = True
        shared, self._state = self.state, {**self._state}
        for key in [key for key in shared if isinstance(key, Tensor)]:
            del shared[key]
        shared.update(self.state_of_parameters.given)
        self.optimizer.state = shared  # type: ignore[assignment]

    @property
    def state(self) -> dict[Any, State]:
        """The optimizer's, by stand-in: its own dict, which others may share that it wraps."""
        self.stand_ins.finish()
        return self._state

    def entry_of(self, key: Any) -> Entry | None:
        """The parameter ``key``, if it is sharded for an optimizer."""
        entry = self.engine.entries.get(id(key)) if isinstance(key, Tensor) else None
        return entry if entry is not None and entry.trained else None

    def entries(self) -> list[list[Entry]]:
        """The parameters of each group.

        Raises:
            ValueError: one was added too late.
        """
        if self._groups:
            return self._groups
        found: list[list[Entry]] = []
        for index, group in enumerate(self.optimizer.param_groups):
            if not self.engine.trained_ids.issuperset(map(id, group["params"])):
                raise ValueError(
                    f"A parameter of param group {index} of {type(self.optimizer).__name__} was"
                    " added after the last `training_step` began, and its gradients were not kept."
                    " Add it between steps (in `on_train_epoch_start` or `on_train_batch_start`),"
                    " and step the optimizer after the next one."
                )
            # integers have no gradient
            found.append([entry for p in group["params"] if (entry := self.entry_of(p))])
        return found

    def names(self) -> list[list[str]]:
        """The names of the parameters of each group."""
        return [[entry.name for entry in entries] for entries in self.entries()]

    def shared(self) -> dict[Any, Any]:
        """The state that belongs to no parameter, such as one step counter for all."""
        return {key: value for key, value in self.state.items() if not isinstance(key, Tensor)}

    @torch.no_grad()
    def insert(self, steps: bool = True) -> None:
        """Put the stand-ins into the groups, unless they are there; collective.

        ``steps``: the optimizer steps with the gradients as they are now.
        """
        groups = self.entries()
        self.engine.passes.reduce_held()
        if steps:
            self.engine.gradients.begin_step(type(self.optimizer).__name__, groups)
        if not self._parameters:
            self.stand_ins.load(groups)
            self._swap(groups)
            for group in self.optimizer.param_groups if self.stand_ins.steps_later else ():
                group["params"].clear()

    def _swap(self, groups: list[list[Entry]]) -> None:
        self.take_state()
        state = self.state  # waits for the host, which may have failed
        self._groups = groups
        for group, its in zip(self.optimizer.param_groups, self.stand_ins.of(groups), strict=True):
            self._parameters.append(group["params"][:])
            group["params"][:] = its
        self.optimizer.state = state  # type: ignore[assignment]

    def take_state(self) -> None:
        """What users have set in `optimizer.state`, or put in its place, becomes known; local."""
        if self.is_closed:
            return
        if (given := self.optimizer.state) is not self.state_of_parameters and not self._parameters:
            self.state_of_parameters.clear()
            self.state_of_parameters.update(given)
        self.state_of_parameters.cut()

    def _swap_back(self) -> list[list[Entry]]:
        for group, its in zip(self.optimizer.param_groups, self._parameters, strict=True):
            group["params"][:] = its
        self._state, self.optimizer.state = self.optimizer.state, self.state_of_parameters  # type: ignore
        self._parameters, groups, self._groups = [], self._groups, []
        return groups

    @torch.no_grad()
    def restore(self) -> None:
        """The optimizer has stepped: put the parameters back, with its values; collective."""
        if self._parameters:
            groups = self._swap_back()
            self.stand_ins.store(groups)
            self.engine.weights_changed(chain(*groups))

    def abandon(self) -> None:
        """If a step has failed, put the parameters back, with what it has made of shards;
        gradients stay, as in torch.
        """
        if self._parameters:
            entries = list(chain(*self._swap_back()))
            self.stand_ins.drop()
            for entry in entries:
                entry.shard.grad = None
            self.engine.weights_changed(entries)

    @contextmanager
    def stand_ins_there(self) -> Iterator[None]:
        """Inside, the groups hold the stand-ins, and `optimizer.state` is theirs, as in a step; but
        they have no values.
        """
        self._swap(self.entries())
        try:
            yield
        finally:
            self._swap_back()

    def parts_of_gradients(self) -> list[Tensor]:
        """This rank's parts [elements] of the gradients that it steps on, which may be changed
        element by element (scaled, clipped); collective if gradients are held.
        """
        gradients = self.engine.gradients
        self.engine.passes.reduce_held()
        gradients.forget()
        parts = map(gradients.part, chain(*self.entries()))
        return [part for part in parts if part is not None]

    def gradient_norm(self) -> Tensor:
        """The 2-norm [] of all ranks' parts, in float64; collective."""
        return self.engine.gradient_norm(chain(*self.entries()))

    def _before(
        self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if self._parameters or getattr(closure, "func", None) == self._evaluate:
            self._nested += 1
            return None
        self._nested = 0
        with profile_range("optimizer begins", type(optimizer).__name__):
            self.engine.begin_step(self)
            if closure is None or self.stand_ins.needed_before_closure:
                self.insert(closure is None)
        if closure is None:
            return None
        return args[:1], {**kwargs, "closure": partial(self._evaluate, closure)}

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self.restore()
        value = self.stand_ins.convert_loss(closure())
        self.insert()
        return value

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._nested:
            self._nested -= 1
            return
        with profile_range("optimizer ends", type(optimizer).__name__):
            self.restore()
