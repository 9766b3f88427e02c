"""A backward pass: which unit's turn it is, from the first gradient to gradients that the
optimizers see.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident

import torch
from torch import Tensor

from ..residency.home import ResidencyError
from ..residency.resting import get_grad, set_grad
from ..support import profile_range
from ..support.thread_stacks import read_frames
from .access import Access
from .agreement import Agreement
from .buffers import Buffers
from .gradients import Gradients
from .runs import WAITING, Run, current_run, watch_runs
from .saved_tensors import SavedTensors
from .uneven import JointSteps
from .unit import Unit


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
        self._access, self._adopt_values, self._failed = access, adopt_values, failed
        gradients.settle, joint.assist_backward = self.settle, self.assist
        # Indices of units in the order that all ranks expect, the reverse of their forward. All
        # must issue exchanges in one order, but a rank may skip a unit that others visit (its loss
        # does not depend on it there): walking this to its end, it takes part in the exchanges of
        # all visits, its own or not.
        self.coming: deque[int] = deque()
        self.active = False  # a pass has begun and not ended
        # all ranks end one, whatever this one has to differentiate; and have
        self.opened = self._ended = False
        self.thread = get_ident()  # whose backwards may begin a pass, or fail it
        self.told = watch_runs(self)
        if self._reducer.whole:
            WAITING.append(self.told)
        self._run: Run | None = None  # that it has joined, and whose end will be its own
        self._accumulates = True
        self._muted = frozenset[
            int
        ]()  # numbers of the parameters whose gradients are not wanted in it
        # what other ranks lack of rank 0's buffers, as all ranks agreed, while graphs may need them
        # as saved
        self._owed = b""
        self._current: Unit | None = None  # the unit whose backward runs
        self._holds = False  # its memory is its own meanwhile
        self._recomputed = saved.recomputed
        self._hides = False  # gradients of before are adopted, and out of autograd's way
        self.added = 0  # 1: the pass has added to gradients

    def collector(self, unit: Unit, index: int) -> Callable[[Tensor], None]:
        """The hook that takes the gradient of trained parameter ``index`` of ``unit`` to the
        reducer, and drops it.

        One function, because it runs for each parameter in each backward. Its reference is weak:
        torch keeps the hooks of a parameter where the garbage collector cannot look, so the model
        would never be freed.
        """
        where, name, number, views = (
            unit.index,
            unit.trained[index].name,
            unit.trained[index].number,
            self._reducer.views,
        )
        claimed, written, lies_there = (
            self._reducer.claimed,
            self._reducer.written,
            self._reducer.whole,
        )
        used, graphs, arrived = (
            self._gradients.used,
            self._gradients.graphs,
            self._gradients.arrived,
        )
        get_self = weakref.ref(self)

        def collect(parameter: Tensor) -> None:
            if (now := get_self()) is None:
                return  # the engine is gone, and the parameter is the user's alone
            with torch._C.DisableTorchFunctionSubclass():  # of a resting parameter, too
                grad = get_grad(parameter)
                set_grad(parameter, None)
            if not now.active:
                now.begin()
            # a custom Function may return None
            if grad is None or (now._muted and number in now._muted):
                return
            if used[number] and len(parameter._post_accumulate_grad_hooks) > 1:
                raise _seen_alone(name)
            if not claimed[where]:
                now._reducer.claim(where)
            if grad.is_sparse:
                grad = grad.to_dense()
            if grad.requires_grad:  # made with create_graph: what is reduced has no graph
                graphs[number] = 1
            if not written[number] or (lies_there and arrived[number]):
                views[number].copy_(grad.detach())
                written[number] = 1
            else:
                views[number].add_(grad.detach())
            used[number] = arrived[number] = now.added = 1
            if lies_there:
                with torch._C.DisableTorchFunctionSubclass():
                    set_grad(parameter, views[number])

        return collect

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Around what differentiates losses; collective at exit, on ranks that had none, too."""
        if self.opened:
            yield
            return
        self.opened, self._ended = True, False
        stepping, self.thread = self.thread, get_ident()
        if not self._reducer.whole:
            WAITING.append(self.told)
        try:
            yield
            if self.active or not self._ended:
                self.end()
        finally:
            self.opened, self.thread = False, stepping
            if not self._reducer.whole and self.told in WAITING:
                WAITING.remove(self.told)

    def before_run(self, run: Run) -> None:
        """``run`` begins. Those of other threads join with their first gradient, if that is one of
        ours.
        """
        if get_ident() != self.thread and read_frames(lambda frames: self.thread not in frames):
            self.thread = get_ident()  # that one has ended
        if self.active or self._run is not None or get_ident() != self.thread:
            return  # who has begun a pass ends it
        self._join(run)
        if self._reducer.whole:
            self._adopt()  # autograd would add to what it finds

    def _join(self, run: Run) -> None:
        self._run, self._accumulates = run, run.accumulates
        run.runners.append(self)

    def after_run(self) -> None:
        """The run that it has joined is over."""
        if self.active or (self.opened and self._accumulates):
            self.end()
        else:
            self._show_again()
        self._run = None

    def fail_run(self, run: Run) -> None:
        """An exception has ended ``run``, which it may not have joined."""
        joined = self._run is run
        if not joined and (self._run is not None or get_ident() != self.thread):
            return  # another thread's, of other parameters
        self._run = None
        if joined and self.active:
            self._failed()
        elif not self.active:
            self._drop_leftovers()
            self._show_again()

    def begin(self, silent: bool = False) -> None:
        """The first gradient is there; ``silent``: not on this rank."""
        if self.active:
            return
        if self._run is None and not silent:
            run = current_run(self.thread)
            if run is None:
                raise ResidencyError(
                    "A loss was differentiated past `torch.autograd`, by a scripted function, for"
                    " instance, or in one of two threads that differentiate on a device. Call"
                    " `loss.backward()` or `self.manual_backward(loss)` in Python, in the thread of"
                    " the step."
                )
            # autograd has added to what was not out of its way
            if self._reducer.whole and self._gradients.any_shown():
                raise ResidencyError(
                    "Gradients were accumulated in another thread than the one that runs"
                    " `training_step`. Call `loss.backward()` in that one, or clear gradients"
                    " before."
                )
            self._join(run)
        self._accumulates |= self._run is None
        if self._accumulates:
            self._gradients.give_back()
        if not self._hides:
            self._adopt()
        self._joint.begin_backward()
        self.active, self.added = True, 0
        self._muted = self._gradients.begin_windows(self._accumulates)

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
        # Other ranks may be using the units on the way: take part in what they exchange, one visit
        # at a time, because each gathers the one after it ahead.
        while unit.index in self.coming:
            passed = self.coming.popleft()
            self._visit(self._units[passed])
            if passed == unit.index:
                return
        self._visit(unit)

    def recompute(self, unit: Unit) -> None:
        """A checkpoint runs ``unit`` again: what it saves must stay until the backward that reads
        it is over.
        """
        if unit.use():
            self._recomputed.append(unit)

    def _visit(self, unit: Unit) -> None:
        if unit is self._current:
            return
        self._leave()
        self._current, self._holds = unit, unit.use()
        if self.coming:
            self._units[self.coming[0]].gather(ahead=True)

    def _leave(self) -> None:
        unit, self._current = self._current, None
        if unit is None:
            return
        if self._holds:
            unit.unuse()
        if self._recomputed:
            # another's may still come, and by a way that nobody announces
            self._drop_recomputed([unit])
        # Nested units get more gradients while the units inside them run; one reduction at the end
        # is enough.
        if unit.trained and not unit.nested and unit.index not in self.coming:
            self.added |= self._accumulates
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
        self._ended = True
        self._access.held.follow_all()

    def complete(self) -> None:
        """Take part in what is left to exchange; collective.

        Other ranks may need units that the loss of this one does not depend on (or none at all).
        """
        while self.coming:
            self._visit(self._units[self.coming.popleft()])
        self._leave()
        self._drop_recomputed(self._units)
        for unit in reversed(self._units):
            if unit.nested:
                self._reducer.reduce(unit)

    def _conclude(self) -> None:
        """Agree with the other ranks on what was used, reduce what is left, and show the
        gradients.
        """
        late = bytes(len(self._units)) if self._reducer.holding else bytes(self._reducer.claimed)
        joint = self._joint.running
        with self._joint.end_of_backward():
            with profile_range("agreement"):
                late, changed, used = self._agreement.reach(
                    late, self._buffers.changed(), bytes(self._gradients.used)
                )
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
        self._saved.arena.spilled = None
        self.active = self._hides = False

    def end_step(self) -> None:
        """No graph of the step is differentiated any more: buffers become rank 0's; collective if
        any changed.
        """
        owed, self._owed = self._owed, b""
        if any(owed):
            self._buffers.synchronize(owed)

    def assist(self, unit: Unit | None) -> None:
        """Take part in a backward that this rank does not run: in the reduction of ``unit``, or
        (None) in the end.
        """
        if not self.active:
            self.coming.clear()
            self.begin(silent=True)
        if unit is None:
            self._conclude()
        else:
            self._reducer.reduce(unit)
            self._reducer.finish()

    # ------------------------------------------------------------------------------- between passes

    def settle(self, name: str = "") -> None:
        """Reduce gradients that are held, between passes, because that of parameter ``name`` is
        asked for, or all are.

        Collective if there are any.
        """
        if not self._reducer.held:
            return
        if self.active:
            what = f"The gradient of parameter {name!r}" if name else "Gradients"
            raise ResidencyError(
                f"{what} cannot be read or set in the middle of a backward pass while the ranks"
                " hold those of earlier micro-batches back (`reduce_once=True`). Do that after the"
                " backward, or do without the option."
            )
        holding, self._reducer.holding = self._reducer.holding, False
        self._joint.begin_backward()
        # what is held is dropped where gradients were cleared since
        self._gradients.begin_windows(False)
        self._conclude()
        self._reducer.holding = holding

    def abandon(self) -> None:
        """After an exception: the next pass starts clean."""
        if self.active:
            held = self._reducer.held
            if self.added or not held:
                self._reducer.abandon()
                self._reducer.zero_untouched()  # nothing is left of a window that began with it
            if self.added:
                self._gradients.give_up(held)
        self._drop_leftovers()
        self._show_again()
        self.coming.clear()
        self._recomputed.clear()
        self._current, self.active, self._owed = None, False, b""

    def _show_again(self) -> None:
        """No pass has ended, which would have shown the gradients."""
        if self._hides:
            self._gradients.show_again()
            self._hides = False

    def _drop_leftovers(self) -> None:
        """What autograd put on a parameter before a user's hook raised, which ran before the
        engine's took it away.
        """
        if self._reducer.whole and not self._hides:
            return  # they are the gradients
        with torch._C.DisableTorchFunctionSubclass():
            for entry in (entry for unit in self._units for entry in unit.trained):
                set_grad(entry.parameter, None)


def _seen_alone(name: str) -> ResidencyError:
    return ResidencyError(
        f"Parameter {name!r} has a post-accumulate hook, and got a gradient before the one of an"
        " earlier backward, or of an earlier use of it, was cleared: the hook would find the last"
        " one alone. Use `parameter.register_hook`, which is given each by itself, or change"
        " `parameter.grad` after the backward (`on_after_backward`)."
    )
