"""All units of a model: what runs when, from the first forward to the end of backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from .access import NO_GRAPH_TASK, Access, graph_task
from .agreement import Agreement
from .buffers import Buffers
from .build import (
    SlotDtype,
    build_units,
    check_same_structure,
    fill_shards,
    optimizer_groups,
    optimizer_names,
)
from .collectives import LocalCollectives
from .gradients import Gradients
from .hooks import copy_views, install, watch_outputs
from .joint import JointSteps
from .layout import ArenaLayout
from .order import BackwardSchedule, ForwardOrder
from .partition import UnitPolicy, find_units
from .reduce import BackwardPass, Reducer
from .resting import ResidencyError, home_of, unsettle
from .saved import SavedTensors
from .shards import FlatGroup
from .streams import make_lane
from .structure import Structure, check_optimizer
from .unit import Phase, Unit
from .whole import WholeReducer

transform = torch._C._functorch.peek_interpreter_stack  # the torch.func transform that runs, if any


def _own_dtype(name: str, parameter: nn.Parameter) -> torch.dtype:
    return parameter.dtype


class Zero3Engine:
    """Shards a model's parameters, gradients and optimizer state over the ranks (ZeRO stage 3, arXiv 1910.02054).

    Args:
        model: any module; its parameters stay the same objects with the same names.
        optimizers: built on the parameters of ``model``; each param group is re-pointed to its flat shard.
        device: where shards, slots and computation live.
        collectives: the door to the other ranks.
        unit_policy: see :func:`~.partition.find_units`.
        slot_dtype: dtype that a parameter is gathered in, from its name and itself; its own by default.
        debug: poison given-up slots and look for lost writes; see :mod:`~.checked`.
        reduce_buffers: 1 holds the gradients of one unit; 2 lets a unit's reduction overlap the next unit's backward.

    Raises:
        ValueError: see :func:`~.partition.find_units`, :func:`~.build.optimizer_groups`,
            :func:`~.build.check_same_structure`.
    """

    units: list[Unit]
    groups: list[FlatGroup]
    differing: list[str]  # names whose initial value on this rank was not rank 0's

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        device: torch.device,
        collectives: LocalCollectives,
        unit_policy: UnitPolicy | None = None,
        slot_dtype: SlotDtype = _own_dtype,
        reduce_buffers: int = 1,
        debug: bool = False,
    ) -> None:
        self.device, self.collectives = device, collectives
        home = optimizer_groups(model, optimizers)
        self.optimizer_names = optimizer_names(model, optimizers)
        parts = find_units(model, unit_policy)
        self.units, self.groups = build_units(parts, home, slot_dtype, collectives.world_size, debug)
        check_same_structure(self.units, collectives)
        for unit in self.units:
            for chunk in unit.chunks:
                chunk.own(self.groups, collectives.rank)
        for group in self.groups:
            group.allocate(device)
        earlier = {id(found): found for p in model.parameters() if (found := home_of(p)) is not None}
        self.differing = fill_shards(self.units, model, collectives, device)
        for found in earlier.values():
            found.retire()
        self.buffers = Buffers(model, collectives, device)
        self.differing += self.buffers.differing
        self._connect(reduce_buffers)
        self._forward = ForwardOrder()
        self._schedule = BackwardSchedule()
        self._current: Unit | None = None  # the unit whose backward runs
        self._recomputed: list[Unit] = []  # held because a recomputation saved views of them
        self._explicit = False  # backward() will close the pass; else a callback of autograd does
        self._pass = BackwardPass(self._begin_backward, self.gradients.used)
        self._root = next((u for u in self.units if u.root), None)
        self._handles = [h for u, p in zip(self.units, parts, strict=True) for h in install(u, p.members, self)]
        self._attach(optimizers)
        self.structure = Structure(model)

    # ------------------------------------------------------------------------------------------------ set-up, the end

    def _connect(self, reduce_buffers: int) -> None:
        whole = self.collectives.world_size == 1
        sizes = [0 if whole else u.nbytes for u in self.units]
        layout = ArenaLayout.build(sizes, [u.nested for u in self.units])
        # Allocated here and never again: the first forward may run under inference_mode, and CUDA graphs need addresses.
        self.arena = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.device)
        gather, reduce = make_lane(self.device), make_lane(self.device)
        for unit, offset in zip(self.units, layout.offsets, strict=True):
            unit.rivals = [self.units[j] for j in layout.overlapping(unit.index)] if not whole else []
            unit.connect(self.collectives, gather, self.arena, offset)
        self.collectives.expect(layout.nbytes // self.collectives.world_size)
        if whole:
            self.reducer: Reducer = WholeReducer(self.units)
        else:
            self.reducer = Reducer(self.units, self.collectives, reduce, self.device, reduce_buffers)
        self._saved = SavedTensors(self.units, self.arena, layout.offsets)
        used = bytearray(max((g.last for g in self.groups), default=0))
        self.gradients = Gradients(self.units, self.groups, self.collectives.rank, used, self.reducer)
        self._agreement = Agreement(self.units, self.collectives, used, len(self.buffers))
        self.joint = JointSteps(self.units, self.collectives, self._assist_backward)
        self.access = Access(self.units, self.collectives, self.weights_changed, self.gradients, self.close)

    def _attach(self, optimizers: Sequence[Optimizer]) -> None:
        for i, optimizer in enumerate(optimizers):
            for g, group in enumerate(optimizer.param_groups):
                flats = [f for f in self.groups if (f.key.optimizer, f.key.group) == (i, g)]
                for flat in flats:
                    flat.attach(optimizer, group)
                group["params"][:] = [p for flat in flats for p in flat.parameters]
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.weights_changed()))

    def close(self) -> None:
        """Take the hooks away. The values stay in the shards; another engine may take them over."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def unshard(self) -> None:
        """Make the parameters ordinary again, full and in CPU memory of their own, and close; collective."""
        for unit in self.units:
            full = unit.full(lambda group: group.data)
            for entry in unit.entries:
                unsettle(entry.parameter)
                entry.parameter.__class__ = entry.cls
                entry.parameter.data = full[entry.name].to("cpu", copy=True)
        self.close()

    def memory_ledger(self) -> dict[str, Any]:
        """Bytes that the engine keeps on this rank between steps, by what they are for.

        Returns:
            "parameters", "gradients" (shards), "slots" (the arena), "reduce_buffer" (and what the door holds), "units".
        """
        return {
            "parameters": sum(g.data.nbytes for g in self.groups),
            "gradients": sum(g.grad.nbytes for g in self.groups if g.grad is not None),
            "slots": self.arena.nbytes,
            "reduce_buffer": self.reducer.buffer.nbytes + self.collectives.nbytes,
            "units": {unit.name: unit.nbytes for unit in self.units},
        }

    # ------------------------------------------------------------------------------------------------ a step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around everything that runs the model: the forward and loss of a micro-batch, an evaluation step."""
        if self.access.in_step:
            yield
            return
        if self._pass.active:
            self.abandon()  # a backward without `backward()` around it raised, and the user went on
        self.structure.check()
        self._adopt_values()
        self._forward.begin()
        self._schedule.clear()
        if not torch.is_grad_enabled():
            self.collectives.trace.clear()  # no backward will come to compare and clear it
        self.access.in_step = True
        if self._root is not None and self._root.gather():
            self._root.use()
        try:
            with self._watch_saved():
                yield
        except BaseException as error:
            self.abandon()
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                raise ResidencyError(
                    "torch.func transforms that differentiate (grad, vjp, jacrev, hessian) cannot run in a step: weights that "
                    "autograd saves there are looked up later, which torch.func does not allow. Use torch.autograd.grad or "
                    "torch.autograd.functional, or run the transform outside of a step in `with strategy.gathered(module):`."
                ) from error
            raise
        finally:
            self.access.in_step = False
            self._saved.forget()
        if self._root is not None and self._root.pins:
            self._root.unuse()

    def _watch_saved(self) -> AbstractContextManager[Any]:
        if self.collectives.world_size == 1:
            return nullcontext()  # nothing ever moves
        return saved_tensors_hooks(self._saved.pack, self._saved.unpack)

    def adopt_gradients(self) -> None:
        """Gradients that the user assigned to parameters reach the optimizers."""
        for entry, grad in self.reducer.changed():  # on one rank, where parameters are ordinary
            self.access.set_gradient(entry.parameter, grad)
        self.gradients.bind_assigned()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around ``loss.backward()``: at its end gradients are summed over ranks and shown to the optimizers.

        Without it autograd's final callback does the same, except where re-entrant checkpoints nest backward passes.
        """
        self.adopt_gradients()
        self.reducer.hide()
        self._explicit = True
        try:
            yield
            self._end_backward()
        except BaseException:
            self.abandon()
            raise
        finally:
            self._explicit = False

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        check_optimizer(optimizer)
        self._adopt_values()
        self.adopt_gradients()

    def _adopt_values(self) -> None:
        for unit in self.units:
            if unit.whole:
                unit.adopt()

    def abandon(self) -> None:
        """Drop all that is open after an exception; the next step starts clean."""
        for unit in self.units:
            unit.abandon()
        self.reducer.abandon()
        self.collectives.trace.clear()
        self._schedule.clear()
        self._saved.forget()
        self._current, self._recomputed, self._pass.active = None, [], False

    def weights_changed(self) -> None:
        """The shards were written: nothing gathered before is true any more."""
        self._saved.weights_changed()
        self.access.forget_gradients()
        for unit in self.units:
            if unit.phase is not Phase.RESTING or unit.whole:
                unit.refresh()

    # ------------------------------------------------------------------------------------------------ forward

    def enter_forward(self, unit: Unit) -> None:
        """See :class:`~.hooks.Listener`."""
        if graph_task() != NO_GRAPH_TASK:
            # A checkpoint recomputes. What it saves must stay until the backward that reads it is over.
            if unit.gather():
                unit.use()
                self._recomputed.append(unit)
            return
        self.collectives.progress[0] = unit.index
        if not unit.gather():
            return  # a unit in use has the memory: the parameters rest, and each read gathers
        unit.use()
        if not self.access.in_step:
            self._saved.enter_outside(unit)
        following = self._forward.enter(unit.index)
        if following is not None:
            self.units[following].gather()

    def leave_forward(self, unit: Unit, outputs: Any) -> Any:
        """See :class:`~.hooks.Listener`."""
        if unit.lent or transform() is not None:
            # The values are the user's, or torch.func differentiates: its backward is none of ours, and hooks would start one.
            return self._leave_quietly(unit)
        copied = copy_views(outputs, self._saved.in_slot)
        if copied is not None:
            outputs = copied
        if graph_task() != NO_GRAPH_TASK:
            watch_outputs(unit, outputs, self)
            return copied
        if outputs is not None and torch.is_grad_enabled() and watch_outputs(unit, outputs, self):
            self._schedule.record(unit.index)
        if unit.pins:
            unit.unuse()
        if not self.access.in_step:
            self._saved.leave_outside(unit)
        return copied

    def _leave_quietly(self, unit: Unit) -> None:
        if unit.pins and graph_task() == NO_GRAPH_TASK:
            unit.unuse()

    # ------------------------------------------------------------------------------------------------ backward

    def enter_backward(self, unit: Unit) -> None:
        """See :class:`~.hooks.Listener`."""
        if unit is self._current:
            return
        if not self._pass.active:
            self._begin_backward()
        # Other ranks may be using the units on the way: take part in what they exchange, one visit at a time, because each
        # gathers the one after it ahead.
        while self._schedule.pending(unit.index):
            passed = self._schedule.advance()
            self._visit(self.units[passed])
            if passed == unit.index:
                return
        self._visit(unit)

    def _begin_backward(self, silent: bool = False) -> None:
        if self._pass.active:
            return
        if not self._explicit:
            self.adopt_gradients()
            self.reducer.hide()
        self._pass.active = True
        self._pass.muted = self.gradients.begin_windows()
        if not self._explicit and not silent:
            Variable._execution_engine.queue_callback(self._end_backward)

    def _visit(self, unit: Unit) -> None:
        if unit is self._current:
            return
        self._leave()
        if self._recomputed and unit not in self._recomputed:
            for held in self._recomputed:
                held.unuse()
            self._recomputed = []
        self.collectives.progress[0] = unit.index
        if unit.gather():
            unit.use()
            self._current = unit
        following = self._schedule.upcoming()
        if following is not None:
            self.units[following].gather()

    def _leave(self) -> None:
        unit, self._current = self._current, None
        if unit is None:
            return
        if unit.pins:
            unit.unuse()
        # Nested units get more gradients while the units inside them run; one reduction at the end is enough.
        if unit.trained and not unit.nested and not self._schedule.pending(unit.index):
            self.reducer.reduce(unit)

    def collector(self, unit: Unit, index: int) -> Callable[[Tensor], None]:
        """See :class:`~.hooks.Listener`."""
        return self.reducer.collector(unit, index, self._pass)

    def _end_backward(self) -> None:
        # Other ranks may need units that the loss of this one does not depend on (or none at all): take part in the exchange.
        self._begin_backward(silent=True)
        while self._schedule.upcoming() is not None:
            self._visit(self.units[self._schedule.advance()])
        self._leave()
        for held in self._recomputed:
            held.unuse()
        self._recomputed = []
        late = bytes(self.reducer.is_open(unit) for unit in self.units)
        with self.joint.end_of_backward():
            used, late, changed = self._agreement.reach(late, self.buffers.changed())
            for unit in reversed(self.units):
                if unit.trained and (unit.nested or late[unit.index]):
                    self.reducer.reduce(unit)
            if any(changed):
                self.buffers.synchronize(changed)
        self.reducer.finish()
        self.reducer.zero_untouched()
        self.access.forget_gradients()
        self.gradients.show(used)
        self._saved.forget()
        self._pass.active = False

    def _assist_backward(self, unit: Unit | None) -> None:
        """Take part in a backward that this rank does not run: in the reduction of ``unit``, or (None) in the end."""
        if not self._pass.active:
            self._schedule.clear()
            self._begin_backward(silent=True)
        self._end_backward() if unit is None else self.reducer.reduce(unit)
