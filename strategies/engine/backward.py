"""A backward pass: which unit's turn it is, from the first gradient to gradients that the optimizers see."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Variable

from ..residency.home import ResidencyError
from ..residency.resting import get_grad, set_grad
from .access import Access
from .agreement import Agreement
from .buffers import Buffers
from .gradients import Gradients
from .joint import JointSteps
from .order import BackwardSchedule
from .saved import SavedTensors
from .unit import Unit


class _End:
    """What autograd calls when a pass is over. It lets go of it uncalled when an exception has ended the pass."""

    def __init__(self, passes: Backward) -> None:
        self._passes, self._number, self._over = passes, passes.number, False

    def __call__(self) -> None:
        if not self._passes.explicit:
            self._passes.end()
        self._over = True

    def __del__(self) -> None:
        # Threads of devices may let go of it when the exception has been dealt with, and another pass runs.
        if not self._over and self._passes.active and self._passes.number == self._number:
            self._passes.failed()


class Backward:
    """Walks through the units as gradients arrive, on every rank in the same order."""

    def __init__(
        self,
        units: list[Unit],
        gradients: Gradients,
        agreement: Agreement,
        buffers: Buffers,
        joint: JointSteps,
        saved: SavedTensors,
        access: Access,
        adopt_values: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self._units, self._gradients, self._reducer = units, gradients, gradients.reducer
        self._agreement, self._buffers, self._joint, self._saved = agreement, buffers, joint, saved
        self._access, self._adopt_values, self.failed = access, adopt_values, failed
        self.schedule = BackwardSchedule()  # the visits that the forward has led to
        self.active = False  # the pass has begun and not ended
        self.number = 0  # of passes that have begun
        self.explicit = False  # it was opened, and will be ended; else a callback of autograd does
        self._muted = frozenset[int]()  # numbers of the parameters whose gradients are not wanted in it
        self._owed = b""  # what other ranks lack of rank 0's buffers, as all ranks agreed, while graphs may need them as saved
        self._current: Unit | None = None  # the unit whose backward runs
        self._holds = False  # its memory is its own meanwhile
        self._recomputed = saved.recomputed
        self._hides = False  # gradients of before are adopted, and out of autograd's way
        self.added = 0  # 1: the pass has added to gradients

    def collector(self, unit: Unit, index: int) -> Callable[[Tensor], None]:
        """The hook that takes the gradient of trained parameter ``index`` of ``unit`` to the reducer, and drops it.

        One function, because it runs for each parameter in each backward. Its reference is weak: torch keeps the hooks of a
        parameter where the garbage collector cannot look, so the model would never be freed.
        """
        where, name, number, views = unit.index, unit.trained[index].name, unit.trained[index].number, self._reducer.views
        claimed, written = self._reducer.claimed, self._reducer.written
        used, graphs = self._gradients.used, self._gradients.graphs
        get_self = weakref.ref(self)

        def collect(parameter: Tensor) -> None:
            if (now := get_self()) is None:
                return  # the engine is gone, and the parameter is the user's alone
            with torch._C.DisableTorchFunctionSubclass():  # of a resting parameter, too
                grad = get_grad(parameter)
                set_grad(parameter, None)
            added = grad is views[number]  # to what is shown; the user has not cleared it
            if not now.active:
                _require_last(parameter, name)
                if added:
                    set_grad(parameter, grad)
                now.begin()
            if grad is None or (now._muted and number in now._muted):  # a custom Function may return None
                return
            used[number] = now.added = 1
            if not claimed[where]:
                now._reducer.claim(where)
            if grad.is_sparse:
                grad = grad.to_dense()
            if grad.requires_grad:  # made with create_graph: what is reduced has no graph
                graphs[number] = 1
            if added:
                _require_current(name, bool(written[number]))
            elif written[number]:
                views[number].add_(grad.detach())
            else:
                views[number].copy_(grad.detach())
                written[number] = 1

        return collect

    def open(self) -> None:
        """A loss is about to be differentiated, and :meth:`end` will follow."""
        self._adopt()
        self._gradients.give_back()
        self.explicit = True

    def begin(self, silent: bool = False) -> None:
        """The first gradient is there; ``silent``: not on this rank."""
        if self.active:
            return
        if not self._hides:
            self._adopt()
        self.active, self.added = True, 0
        self.number += 1
        if not silent:
            Variable._execution_engine.queue_callback(_End(self))
        self._muted = self._gradients.begin_windows()

    def _adopt(self) -> None:
        self._adopt_values()
        self._access.held.keep()
        self._access.held.adopt()
        self._reducer.hide()
        self._hides = True

    def enter(self, unit: Unit, grad: Tensor) -> None:
        """The gradient ``grad`` of an output of ``unit`` is there."""
        if unit is self._current:
            return
        if not self.active:
            self.begin()
        # Other ranks may be using the units on the way: take part in what they exchange, one visit at a time, because each
        # gathers the one after it ahead.
        while self.schedule.pending(unit.index):
            passed = self.schedule.advance()
            self._visit(self._units[passed])
            if passed == unit.index:
                return
        self._visit(unit)

    def recompute(self, unit: Unit) -> None:
        """A checkpoint runs ``unit`` again: what it saves must stay until the backward that reads it is over."""
        if unit.gather():
            unit.use()
            self._recomputed.append(unit)

    def _visit(self, unit: Unit) -> None:
        if unit is self._current:
            return
        self._leave()
        self._current, self._holds = unit, unit.gather()
        if self._holds:
            unit.use()
        following = self.schedule.upcoming()
        if following is not None:
            self._units[following].gather(ahead=True)

    def _leave(self) -> None:
        unit, self._current = self._current, None
        if unit is None:
            return
        if self._holds:
            unit.unuse()
        if self._recomputed:
            self._drop_recomputed([unit])  # another's may still come, and by a way that nobody announces
        # Nested units get more gradients while the units inside them run; one reduction at the end is enough.
        if unit.trained and not unit.nested and not self.schedule.pending(unit.index):
            self.added = 1
            self._reducer.reduce(unit)

    def _drop_recomputed(self, over: list[Unit]) -> None:
        for held in [held for held in self._recomputed if held in over]:
            self._recomputed.remove(held)
            held.unuse()

    def end(self) -> None:
        """Autograd has finished; collective."""
        self.begin(silent=True)
        self.complete()
        self._conclude()
        self._access.held.follow_all()

    def complete(self) -> None:
        """Take part in what is left to exchange; collective.

        Other ranks may need units that the loss of this one does not depend on (or none at all).
        """
        while self.schedule.upcoming() is not None:
            self._visit(self._units[self.schedule.advance()])
        self._leave()
        self._drop_recomputed(self._units)
        for unit in reversed(self._units):
            if unit.nested:
                self._reducer.reduce(unit)

    def _conclude(self) -> None:
        """Agree with the other ranks on what was used, reduce what is left, and show the gradients."""
        late, joint = bytes(self._reducer.is_open(unit) for unit in self._units), self._joint.running
        with self._joint.end_of_backward():
            late, changed, used = self._agreement.reach(late, self._buffers.changed(), bytes(self._gradients.used))
            for unit in reversed(self._units):
                if late[unit.index]:
                    self._reducer.reduce(unit)
            if self._access.in_step and not joint:
                self._owed = changed  # since the last time, so it holds what an earlier pass found
            elif any(changed):
                self._buffers.synchronize(changed)
        self._reducer.finish()
        self._reducer.held = self._reducer.holding
        if not self._reducer.held:
            self._reducer.zero_untouched()
        self._gradients.show(used)
        self._saved.forget()
        self.active = self._hides = False

    def end_step(self) -> None:
        """No graph of the step is differentiated any more: buffers become rank 0's; collective if any changed."""
        owed, self._owed = self._owed, b""
        if any(owed):
            self._buffers.synchronize(owed)

    def assist(self, unit: Unit | None) -> None:
        """Take part in a backward that this rank does not run: in the reduction of ``unit``, or (None) in the end."""
        if not self.active:
            self.schedule.clear()
            self.begin(silent=True)
        if unit is None:
            self._conclude()
        else:
            self._reducer.reduce(unit)
            self._reducer.finish()

    # ------------------------------------------------------------------------------------------------ between passes

    def settle(self, name: str = "") -> None:
        """Reduce gradients that are held, between passes, because that of parameter ``name`` is asked for, or all are.

        Collective if there are any.
        """
        if not self._reducer.held:
            return
        if self.active:
            what = f"The gradient of parameter {name!r}" if name else "Gradients"
            raise ResidencyError(
                f"{what} cannot be read or set in the middle of a backward pass while the ranks hold those of earlier "
                "micro-batches back (`reduce_once=True`). Do that after the backward, or do without the option."
            )
        holding, self._reducer.holding = self._reducer.holding, False
        self._conclude()
        self._reducer.holding = holding

    def abandon(self) -> None:
        """After an exception: the next pass starts clean."""
        if self.active:
            self._reducer.abandon()
            self._reducer.zero_untouched()  # nothing is left of a window that began with it
            if self.added:
                self._gradients.give_up()
        if self._hides:
            self._drop_leftovers()
            self._gradients.show_again()
        self.schedule.clear()
        self._recomputed.clear()
        self._current, self.active, self._hides, self._owed = None, False, False, b""

    def _drop_leftovers(self) -> None:
        """What autograd put on a parameter before a user's hook raised, which ran before the engine's took it away."""
        with torch._C.DisableTorchFunctionSubclass():
            for entry in (entry for unit in self._units for entry in unit.trained):
                set_grad(entry.parameter, None)


def _require_current(name: str, current: bool) -> None:
    if not current:
        raise ResidencyError(
            f"The gradient of parameter {name!r} was added to the one of before `zero_grad()`. Call backward through the "
            "strategy (`self.manual_backward(loss)`)."
        )


def _require_last(parameter: Tensor, name: str) -> None:
    """The engine's hook, which runs now and takes the gradient away, must have run after those of the user's."""
    if not hasattr(next(reversed(parameter._post_accumulate_grad_hooks.values())), "takes_gradient"):
        raise ResidencyError(
            f"A post-accumulate hook of parameter {name!r} was set after the model was sharded, and would not find its "
            "gradient. Call backward through the strategy (`self.manual_backward(loss)`)."
        )
