"""All units of a model: what runs when, from the first forward to the end of backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..collectives import LocalCollectives
from ..support import profile_range
from .access import Access
from .agreement import Agreement, compare_notes
from .backward import Backward
from .buffers import Buffers
from .build import (
    SlotDtype,
    build_units,
    check_memory,
    check_same_structure,
    fill_shards,
    optimizer_groups,
)
from .forward_order import ForwardOrder
from .gradients import Gradients
from .hooks import install, transform, watch_outputs
from .isolation import apart
from .layout import ArenaLayout
from .module_tree import Structure
from .partition import UnitPolicy, find_units
from .reduction import Reducer
from .saved_tensors import SavedTensors, hooks_refused
from .sharded import (
    NO_GRAPH_TASK,
    ResidencyError,
    describe,
    forget,
    graph_task,
    is_sharded,
)
from .shards import Entry, FlatGroup, attach
from .streams import Stream
from .uneven import JointSteps
from .unit import Arena, Phase, Unit


class Zero3Engine:
    """Shards a model's parameters, gradients and optimizer state over the ranks (ZeRO stage 3,
    arXiv 1910.02054).

    Engine and model hold each other, by hooks and by units. When nobody else holds either, Python's
    garbage collector frees the shards; `gc.collect()` does it at once.

    Args:
        model: any module; its parameters stay the same objects with the same names.
        optimizers: built on the parameters of ``model``; each param group is re-pointed to its flat
            shard. Their options must be the same on all ranks, which the strategy checks; see
            optimizers/guards.py.
        device: where shards, buffers and computation live.
        collectives: the communicator to the other ranks.
        unit_policy: see :func:`~.partition.find_units`.
        slot_dtype: dtype that a parameter is unsharded in, from its name and itself; its own by
            default.
        wire_dtype: dtype in which a parameter travels to an fp32 buffer, from its name and itself;
            fp32 by default.
        reduce_dtype: dtype in which fp32 gradients travel; they are added up in fp32 in any case.
        debug: look for lost writes. See :mod:`~.debug`.
        reduce_once: make :meth:`accumulate` hold gradients; costs a full-size fp32 gradient on
            every rank.

    Raises:
        ValueError: see :mod:`~.partition` and :mod:`~.build`.
    """

    units: list[Unit]
    groups: list[FlatGroup]
    differing: list[str]  # names whose initial value on this rank was not rank 0's
    _stepping: Optimizer | None = None  # an optimizer's own `step` has begun
    # why what a pass that failed had changed is lost, to be raised
    _lost: ResidencyError | None = None
    inspect: Callable[[Unit, Any], None] | None = None  # looks at a unit's outputs

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        device: torch.device,
        collectives: LocalCollectives,
        unit_policy: UnitPolicy | None = None,
        slot_dtype: SlotDtype = lambda name, parameter: parameter.dtype,
        wire_dtype: SlotDtype = lambda name, parameter: torch.float32,
        reduce_dtype: torch.dtype | None = None,
        reduce_once: bool = False,
        debug: bool = False,
    ) -> None:
        self.device, self.collectives = device, collectives
        owners, self.optimizer_names = optimizer_groups(model, optimizers)
        parts = find_units(model, unit_policy)
        self.units, self.groups = build_units(
            parts, owners, slot_dtype, wire_dtype, collectives, debug
        )
        check_memory(model)
        check_same_structure(self.units, model, collectives)
        self.differing = fill_shards(self.units, self.groups, model, collectives, device)
        self.buffers = Buffers(model, collectives, device)
        self.differing += self.buffers.differing
        self._connect(reduce_once, reduce_dtype)
        self._forward = ForwardOrder(foresees=not debug)
        attach(self.groups, optimizers)
        hooks = self._enter_forward, self._leave_forward, self.passes.collector
        dropped: list[str] = []
        self._has_warned, self._spreading = False, list[Unit]()
        self._handles = [handle for unit in self.units for handle in install(unit, *hooks, dropped)]
        self._last: list[
            tuple[dict[int, Any], int]
        ] = []  # step pre-hooks that the user's come before
        self._handles += [
            handle
            for o in optimizers
            for handle in self.hook_step(o, self._before_step, self._after_step)
        ]
        self.structure = Structure(model, self.buffers.look_again)

    # ------------------------------------------------------------------------------ set-up, the end

    def _connect(self, reduce_once: bool, reduce_dtype: torch.dtype | None) -> None:
        sizes = [0 if self.collectives.alone else u.nbytes for u in self.units]
        layout = ArenaLayout.build(sizes, [u.nested for u in self.units])
        # Allocated here and never again: the first forward may run under inference_mode, and CUDA
        # graphs need addresses.
        self.arena = Arena(self.collectives.allocate(layout.nbytes, self.device))
        gather, reduce = Stream(self.device), Stream(self.device)
        for unit, region in zip(self.units, layout.regions, strict=True):
            unit.connect(self.collectives, gather, self.arena, region)
        self.reducer = Reducer(
            self.units,
            self.collectives,
            reduce,
            self.device,
            reduce_once and not self.collectives.alone,
            None if self.collectives.alone else reduce_dtype,
        )
        self._saved = SavedTensors(self.arena)
        self.gradients = Gradients(
            self.units, self.groups, self.reducer, self.collectives.exchange_log
        )
        self.joint = JointSteps(self.units, self.gradients, self.collectives)
        self.access = Access(
            self.units, self.collectives, self.gradients, self.weights_changed, self.close
        )
        self.passes = Backward(
            self.units,
            self.gradients,
            Agreement(self.units, self.collectives),
            self.buffers,
            self.joint,
            self.access,
            self._adopt_values,
            self.abandon,
        )

    def close(self) -> None:
        """Take the hooks away. The values stay in the shards; another engine may take them over."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def unshard(self) -> None:
        """Make the parameters ordinary again, full and in CPU memory of their own, and close;
        collective.
        """
        compare_notes(self.collectives)
        for unit in self.units:
            full = unit.values()
            for entry in unit.entries:
                forget(entry.parameter)
                entry.parameter.__class__ = entry.cls
                entry.parameter.data = full[entry.name].to("cpu", copy=True)
        self.close()

    def rounds(self, parameter: nn.Parameter) -> bool:
        """Whether an unshard rounds it, to what autocast would or what travels."""
        chunks = (
            chunk
            for unit in self.units
            for chunk in unit.chunks
            if chunk.wire_dtype != chunk.master_dtype
        )
        return any(entry.parameter is parameter for chunk in chunks for entry in chunk.entries)

    def expect_graphs(self, captures: bool = True) -> None:
        """Graphs will be captured, or are: they hold memory that units share, and know that."""
        self.arena.is_captured = captures

    # --------------------------------------------------------------------------------------- a step

    @contextmanager
    def step(self, gradients_over: bool = False) -> Iterator[None]:
        """Around everything that runs the model: the forward and loss of a micro-batch, an
        evaluation step.

        ``gradients_over``: those of the last step will be cleared before the backward. Between
        ranks on the CPU their memory is free from here on, which is when activations begin to need
        it.
        """
        if self.access.in_step:
            yield
            return
        self.open_step()
        if not torch.is_grad_enabled():
            self.collectives.exchange_log.suspend_trace()  # no backward will come to compare it
        elif not self.joint.running:
            self.collectives.exchange_log.resume_trace()
        try:
            self.access.in_step = True
            if gradients_over:
                self.gradients.take_away()
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self.access.in_step = self.gradients.over = False
        self.passes.end_step()
        self.access.require_unwritten()

    def open_step(self) -> None:
        """What precedes the first operation of a step."""
        if self._lost or self.passes.active:
            self.abandon()
        self._saved.leave(None)
        self.access.require_unwritten()
        for hooks, key in self._last:
            if key in hooks:
                hooks[key] = hooks.pop(key)  # to the end
        self.structure.check()
        self._adopt_values()
        self._forward.begin()
        self.passes.coming.clear()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """With ``reduce_once``, gradients of backward passes inside stay on this rank, and add up
        there.

        The next backward outside reduces them along with its own, and so does whatever looks at
        gradients before: an optimizer's step, clipping, reading ``parameter.grad``.
        """
        self.reducer.holding = self.reducer.once
        try:
            yield
        finally:
            self.reducer.holding = False

    def adopt_gradients(self) -> None:
        """Gradients that the user assigned to parameters, or that are held, reach the optimizers;
        collective.
        """
        self.passes.settle()
        self.gradients.adopt()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around ``loss.backward()``, which sums gradients over ranks, also of a rank whose loss
        depends on no parameter.
        """
        try:
            with self.passes.expected():
                yield
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Drop all that is open after an exception; the next step starts clean."""
        self._saved.leave(None)
        while self._spreading:
            self._spreading.pop().spread = None
        for unit in tuple(self.arena.in_use):
            try:
                unit.abandon()
            except ResidencyError as error:  # a change in place that cannot be stored
                self._lost = self._lost or error
        self.passes.abandon()
        self.collectives.exchange_log.suspend_trace()
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost

    # ----------------------------------------------------------------------------------- optimizers

    def hook_step(
        self, optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., Any]
    ) -> list[RemovableHandle]:
        """Call ``before`` after all other hooks and ``after`` before them: users see groups as they
        are between steps.
        """
        first, last = (
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        )
        self._last.append((optimizer._optimizer_step_pre_hooks, first.id))
        optimizer._optimizer_step_post_hooks.move_to_end(last.id, last=False)
        return [first, last]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if graph_task() != NO_GRAPH_TASK:
            raise RuntimeError(
                f"{type(optimizer).__name__} was stepped inside of a backward pass (in a hook of a"
                " parameter, for instance), where gradients (of parameter"
                f" {self._groups_of(optimizer)[0].entries[0].name!r} and others) have not been"
                " summed over the ranks. Step it after it."
            )
        for index, group in enumerate(optimizer.param_groups):
            if late := list(filter(is_sharded, group["params"])):
                raise ValueError(
                    f"Param group {index} of {type(optimizer).__name__} (parameter"
                    f" {describe(late[0])} and others) was added after the last `training_step`"
                    " began, and its gradients were not kept. Add it between steps (in"
                    " `on_train_epoch_start` or `on_train_batch_start`), and step the optimizer"
                    " after the next one."
                )
        if (lent := next((unit for unit in self.units if unit.lent), None)) is not None:
            raise ResidencyError(
                f"{type(optimizer).__name__} was stepped inside of `gathered`, where the parameters"
                f" of unit {lent.name} have values of their own: one of the two would be lost. Step"
                " it outside."
            )
        with profile_range("optimizer begins", type(optimizer).__name__):
            if self._lost:
                self.abandon()
            self.access.require_unwritten()
            self._adopt_values()
            self._stepping = optimizer
            if kwargs.get("closure", args[1] if len(args) > 1 else None) is None:
                # else the closure's backward does, and reduces what is held along with its own
                self.adopt_gradients()
                self.hand_over(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with profile_range("optimizer ends", type(optimizer).__name__):
            self._stepping = None
            self.guard(optimizer, True)
            for group in self._groups_of(optimizer):
                group.version = group.public._version
            self._adopt_flat_values(self.stepped_by(optimizer))

    def hand_over(self, optimizer: Optimizer) -> None:
        """What comes next is the step of ``optimizer`` itself, if one has begun: users may call its
        closure elsewhere.
        """
        if self._stepping is optimizer:
            self.gradients.begin_step(optimizer, self._groups_of(optimizer))
            self.guard(optimizer, False)

    def guard(self, optimizer: Optimizer, guarded: bool) -> None:
        """Whether norms of what the groups of ``optimizer`` hold are errors: not while it steps,
        which may be compiled.
        """
        for group in self._groups_of(optimizer):
            group.guard(guarded, self.gradients.adopt_segments)

    def stepped_by(self, optimizer: Optimizer) -> list[Entry]:
        """The parameters that ``optimizer`` has."""
        return [entry for group in self._groups_of(optimizer) for entry in group.entries]

    def _groups_of(self, optimizer: Optimizer) -> list[FlatGroup]:
        return [
            group
            for group in self.groups
            if group.owner is not None and group.owner[0] is optimizer
        ]

    # --------------------------------------------------------------------------------------- values

    def _adopt_values(self) -> None:
        """What the user wrote to parameters in use, or to flat tensors, becomes known."""
        for unit in tuple(self.arena.in_use):
            unit.store_written()
        self._adopt_flat_values()

    def _adopt_flat_values(self, changed: Iterable[Entry] = ()) -> None:
        """Parameters whose flat tensors somebody wrote to are changed, besides those that are known
        to be.
        """
        found = dict.fromkeys(changed)
        for group in self.groups:
            if group.version != group.public._version:
                group.adopt_values()
                found.update(dict.fromkeys(group.entries))
        if found:
            self.weights_changed(found)

    def weights_changed(self, changed: Iterable[Entry] | None = None) -> None:
        """Shards were written, of all parameters unless ``changed`` says which: what was unsharded
        of them before is not true.
        """
        self.gradients.forget()
        entries = (
            [entry for unit in self.units for entry in unit.entries]
            if changed is None
            else list(changed)
        )
        self._warn_of_kept_views(entries)
        units = [self.units[index] for index in dict.fromkeys(entry.unit for entry in entries)]
        for unit in units:
            unit.spread = unit.spread and {}
            if unit in self.arena.holders:
                unit.refresh()
        # autograd compares, where it has saved a weight
        increment_version([entry.parameter for entry in entries])
        with torch._C.DisableTorchFunctionSubclass():
            for entry in entries:
                entry.seen = entry.parameter._version

    def _warn_of_kept_views(self, changed: list[Entry]) -> None:
        if self._has_warned:
            return
        units = {entry.unit for entry in changed}
        held = (
            unit
            for unit in self.arena.kept
            if unit.index in units and unit.phase is not Phase.IN_USE and unit.buffer.is_held()
        )
        for unit in held:
            self._has_warned = True
            warnings.warn(
                f"Somebody holds a view of a weight of unit {unit.name}, made in its forward, while"
                " the weight changes: the view shows the value of before. Keep a `.clone()`, or use"
                " the parameter itself.",
                stacklevel=2,
            )
            return

    # -------------------------------------------------------------------------------------- forward

    def _enter_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if graph_task() == NO_GRAPH_TASK:
            for group in unit.groups:
                # an optimizer's step is known; this is what the user wrote
                if group.version != group.public._version:
                    self._adopt_flat_values()
            if self.collectives.exchange_log.writes_between_steps and not (
                self.access.in_step or unit.lent
            ):
                # where no rank but this one has stored anything, the next exchange of the others
                # tells
                with apart():
                    compare_notes(self.collectives)
        if self.collectives.alone:
            return
        if unit.lent:
            if hooks_refused() is None:
                self._saved.enter(unit)  # a backward may come when the values are gone
            return
        if hooks_refused() is not None or (unit.rounded and not _casts_to(unit.rounded)):
            # What a transform of torch.func saves of weights must stay as it is, and where no
            # autocast runs weights have full precision: each read is a copy of what is unsharded
            # here.
            if unit.spread is None:
                unit.spread = unit.values()
            self._spreading.append(unit)
            return
        unit.use()
        self._saved.enter(unit)
        # in a step that not all ranks run, only some would learn
        if graph_task() == NO_GRAPH_TASK and not self.joint.running:
            following = self._forward.enter(unit.index)
            if following is not None:
                self.units[following].unshard(ahead=True)

    def _leave_forward(self, unit: Unit, module: nn.Module, args: Any, outputs: Any) -> None:
        if unit.lent:
            self._saved.leave(unit)
            return
        if self._spreading and self._spreading[-1] is unit:
            self._spreading.pop()
            if unit not in self._spreading:
                unit.spread = None
            return
        if not unit.pins:
            return  # it never began
        if self.inspect is not None:
            self.inspect(unit, outputs)
        if self.collectives.alone:
            return  # units are reduced as their gradients need the memory of others
        self._saved.leave(unit)
        differentiated = graph_task() != NO_GRAPH_TASK
        if transform() is None and (differentiated or torch.is_grad_enabled()):
            # Outputs that need no gradient here (the input, returned; detached ones) may need one
            # on another rank.
            found = watch_outputs(unit, outputs, self.passes.enter)
            if not differentiated and outputs is not None and (found or unit.trained):
                self.passes.coming.appendleft(unit.index)
        unit.unuse()


def _casts_to(lowered: tuple[str, torch.dtype]) -> bool:
    """Whether autocast is on for this type of device, to this dtype; vmap does without it."""
    device, dtype = lowered
    is_on = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype
    return is_on and transform() is None
