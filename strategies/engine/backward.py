"""A backward pass: which unit's turn it is, from the first gradient to gradients that the
optimizers see.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ..collectives import LocalCollectives
from ..support import profile_range
from ..support.torch_internals import NO_GRAPH_TASK, DisableTorchFunctionSubclass, graph_task
from .agreement import reach_agreement
from .buffers import Buffers
from .chunk import Entry
from .gradients import Gradients
from .reduction import Reducer
from .sharded import ResidencyError, get_grad, set_grad
from .unit import BufferPool, Unit


class Backward:
    """Walks through the units as gradients arrive, on every rank in the same order."""

    def __init__(
        self,
        units: list[Unit],
        gradients: Gradients,
        reducer: Reducer,
        collectives: LocalCollectives,
        buffers: Buffers,
        pool: BufferPool,
        failed: Callable[[], None],
    ) -> None:
        self._units, self._gradients, self._reducer = units, gradients, reducer
        self._collectives, self._buffers, self._pool = collectives, buffers, pool
        self._failed = failed
        # Indices of units in the order that all ranks expect, the reverse of their forward. All
        # must issue exchanges in one order, but a rank may skip a unit that others visit (its loss
        # does not depend on it there): walking this to its end, it takes part in the exchanges of
        # all visits, its own or not.
        self.coming: deque[int] = deque()
        self.in_step = False  # of the model, for the end of which buffers wait
        self.active = False  # a pass has begun and not ended
        self.replayed = False  # by a graph, which has reduced units with others inside
        self._ended = False  # one has, since all ranks expected one
        # what autograd's run holds until its end, or until an exception ends it
        self._run: Callable[[], Callable[[], None] | None] | None = None
        # what other ranks lack of rank 0's buffers, as all ranks agreed, while graphs may need them
        # as saved
        self.stale_buffers = b""
        self._current: Unit | None = None  # the unit whose backward runs

    def collector(self, unit: Unit, entry: Entry) -> Callable[[Tensor], None]:
        """The hook that takes the gradient of ``entry``, of ``unit``, to the reducer, and drops it;
        one of a parameter that no optimizer has is dropped alone.

        One function, because it runs for each parameter in each backward. Its reference is weak:
        torch keeps the hooks of a parameter where the garbage collector cannot look, so the model
        would never be freed.
        """
        where, name, number, views = (
            unit.index,
            entry.name,
            entry.number,
            self._reducer.views,
        )
        claimed, written = self._reducer.claimed, self._reducer.written
        used, trained, dropped = self._gradients.used, entry.trained, self._gradients.dropped
        get_self = weakref.ref(self)

        def collect(parameter: Tensor) -> None:
            if (now := get_self()) is None:
                return  # the engine is gone, and the parameter is the user's alone
            with DisableTorchFunctionSubclass():  # of a sharded parameter, too
                grad = get_grad(parameter)
                set_grad(parameter, None)
            if not trained:
                dropped.add(name)  # reading it is an error
                return
            # hazard: the run of before may have failed, and this is the first gradient since
            if not now.active or (run := now._run) is None or run() is None:
                now.begin()
            # a custom Function may return None
            if grad is None or now._pool.announce:
                return
            if used[number] and len(parameter._post_accumulate_grad_hooks) > 1:
                raise _seen_alone(name)
            if not claimed[where]:
                now._reducer.claim(where)
            if grad.is_sparse:
                grad = grad.to_dense()
            if not written[number]:
                views[number].copy_(grad.detach())
                written[number] = 1
            else:
                views[number].add_(grad.detach())
            used[number] = 1

        return collect

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Around what differentiates losses; collective at exit, on ranks that had none, too."""
        self.drop_failed()
        self._ended = False
        self._pool.store_written()
        yield
        if self.active or not self._ended:
            self.end()

    def begin(self, silent: bool = False) -> None:
        """The first gradient is there; ``silent``: not on this rank."""
        self.drop_failed()
        if self.active:
            return
        self._pool.store_written()
        if not self._pool.announce:
            self._gradients.begin_backward()
        self.active, self.replayed, self._run = True, False, None
        if not silent:
            end = partial(self.end)
            self._run = weakref.ref(end)
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def drop_failed(self) -> None:
        """If an exception has ended autograd's run, nothing of the pass stays."""
        if self.active and self._run is not None:
            # a device's threads may hold what the run held for a moment
            if self._run() is None or graph_task() == NO_GRAPH_TASK:
                self._failed()

    def enter(self, unit: Unit, grad: Tensor) -> None:
        """The gradient ``grad`` of an output of ``unit`` is there."""
        # hazard: it may be the unit in which the run of before has failed
        if unit is self._current and (self._run is None or self._run() is not None):
            return
        self.begin()
        # Other ranks may be using the units on the way: take part in what they exchange, one visit
        # at a time, because each unshards the one after it ahead.
        while unit.index in self.coming:
            passed = self.coming.popleft()
            self._visit(self._units[passed])
            if passed == unit.index:
                return
        self._visit(unit)

    def _visit(self, unit: Unit) -> None:
        if unit is self._current:
            return
        self._leave()
        unit.use()
        self._current = unit
        if self.coming:
            self._units[self.coming[0]].unshard(ahead=True)

    def _leave(self) -> None:
        unit, self._current = self._current, None
        if unit is None:
            return
        unit.unuse()
        # Nested units get more gradients while the units inside them run; one reduction at the end
        # is enough.
        if unit.trained and not (unit.nested or unit.index in self.coming or self._pool.announce):
            self._reducer.reduce(unit)

    def end(self) -> None:
        """Autograd has finished; collective."""
        self.begin(silent=True)
        self.complete()
        if not self._pool.announce:
            self._conclude()
        self.active, self._ended = False, True

    def complete(self) -> None:
        """Take part in what is left to exchange; collective.

        Other ranks may need units that the loss of this one does not depend on (or none at all).
        """
        while self.coming:
            self._visit(self._units[self.coming.popleft()])
        self._leave()
        # a step that not all ranks run drops gradients
        is_over = self._pool.announce or self.replayed
        for unit in () if is_over else reversed(self._units):
            if unit.nested or (self._collectives.alone and self._reducer.claimed[unit.index]):
                self._reducer.reduce(unit)

    def _conclude(self) -> None:
        """Agree with the other ranks on what was used, reduce what is left, and show the
        gradients.
        """
        self._collectives.exchange_log.step_settings.append(self._gradients.before)
        late = bytes(len(self._units)) if self._reducer.holding else bytes(self._reducer.claimed)
        with profile_range("agreement"):
            late, changed, used = reach_agreement(
                self._collectives, late, self._buffers.changed(), bytes(self._gradients.used)
            )
        for unit in reversed(self._units):
            if late[unit.index]:
                self._reducer.reduce(unit)
        if self.in_step:
            self.stale_buffers = (
                changed  # since the last time, so it holds what an earlier pass found
            )
        elif any(changed):
            self._buffers.synchronize(changed)
        self._reducer.finish()
        self._reducer.held = self._reducer.holding
        self._gradients.show(used)

    def end_step(self) -> None:
        """No graph of the step is differentiated any more: buffers become rank 0's; collective if
        any changed.
        """
        owed, self.stale_buffers = self.stale_buffers, b""
        if any(owed):
            self._buffers.synchronize(owed)

    # ------------------------------------------------------------------------------- between passes

    def require_ended(self, name: str) -> None:
        """Raise if the gradient of parameter ``name`` is looked at in the middle of a backward."""
        self.drop_failed()
        if self.active:
            raise ResidencyError(
                f"The gradient of parameter {name!r} was read, or set, in a backward that may have"
                " added to it (in a module's hook, or another parameter's).\nDo that after the"
                " backward (`on_after_backward`), or in a hook of the parameter itself."
            )

    def reduce_held(self, name: str = "") -> None:
        """The gradient of parameter ``name``, or all of them, are going to be read or changed,
        between passes: reduce what is held; collective if there is anything.
        """
        self.require_ended(name)
        if self._reducer.held:
            holding, self._reducer.holding = self._reducer.holding, False
            self._gradients.begin_backward()
            self._conclude()
            self._reducer.holding = holding

    def abandon(self) -> None:
        """After an exception: the next pass starts clean."""
        if self.active:
            self._reducer.abandon()
            self._gradients.clear_all()
        # what autograd put on a parameter before a user's hook raised, which ran before the
        # engine's took it away
        with DisableTorchFunctionSubclass():
            for entry in (entry for unit in self._units for entry in unit.trained):
                set_grad(entry.parameter, None)
        self.coming.clear()
        self._current, self.active, self.stale_buffers = None, False, b""


def _seen_alone(name: str) -> ResidencyError:
    return ResidencyError(
        f"Parameter {name!r} has a post-accumulate hook, and got a gradient before the one of an"
        " earlier backward, or of an earlier use of it, was cleared: the hook would find the last"
        " one alone.\nUse `parameter.register_hook`, which is given each by itself, or change"
        " `parameter.grad` after the backward (`on_after_backward`)."
    )
