"""All units of a model: what runs when, from the first forward to the end of backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..collectives import LocalCollectives
from ..residency.apart import apart
from ..residency.home import ResidencyError, describe, is_sharded, unsettle
from ..residency.numbers import take_back
from ..residency.past_python import guard
from ..residency.resting import NO_GRAPH_TASK, graph_task
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
from .hooks import copy_views, install, transform, watch_outputs
from .kept_views import copy_to_read, note, note_kept
from .layout import ArenaLayout
from .module_tree import Structure
from .one_rank import WholeReducer
from .partition import UnitPolicy, find_units
from .reduction import Reducer
from .runs import ignore_runs
from .saved_tensors import WATCHING, SavedTensors
from .shards import Entry, FlatGroup, attach
from .streams import Stream
from .transforms import enter_transformed, hooks_refused, leave_transformed
from .uneven import JointSteps
from .unit import Arena, Unit


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
        device: where shards, slots and computation live.
        collectives: the communicator to the other ranks.
        unit_policy: see :func:`~.partition.find_units`.
        slot_dtype: dtype that a parameter is gathered in, from its name and itself; its own by
            default.
        wire_dtype: dtype in which a parameter travels to an fp32 slot, from its name and itself;
            fp32 by default.
        reduce_dtype: dtype in which fp32 gradients travel; they are added up in fp32 in any case.
        debug: poison given-up slots and look for lost writes; all slots then have memory of their
            own. See :mod:`~.debug`.
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
        home, self.optimizer_names = optimizer_groups(model, optimizers)
        parts = find_units(model, unit_policy)
        self.units, self.groups = build_units(
            parts, home, slot_dtype, wire_dtype, collectives, debug
        )
        check_memory(model)
        check_same_structure(self.units, model, collectives)
        self.differing = fill_shards(self.units, self.groups, model, collectives, device)
        self.buffers = Buffers(model, collectives, device)
        self.differing += self.buffers.differing
        self._connect(reduce_once, reduce_dtype, debug)
        self._forward = ForwardOrder(foresees=not debug)
        self._root = next((u for u in self.units if u.root), None)
        attach(self.groups, optimizers)
        hooks = self._enter_forward, self._leave_forward, self.passes.collector
        dropped: list[str] = []
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

    def _connect(self, reduce_once: bool, reduce_dtype: torch.dtype | None, debug: bool) -> None:
        whole = self.collectives.alone
        sizes = [0 if whole else u.nbytes for u in self.units]
        layout = ArenaLayout.build(sizes, [debug or u.nested for u in self.units])
        # Allocated here and never again: the first forward may run under inference_mode, and CUDA
        # graphs need addresses.
        self.arena = Arena(self.collectives.allocate(layout.nbytes, self.device))
        gather, reduce = Stream(self.device), Stream(self.device)
        for unit, region in zip(self.units, layout.regions, strict=True):
            unit.connect(self.collectives, gather, self.arena, region)
        if whole:
            self.reducer: Reducer = WholeReducer(self.units, self.collectives)
        else:
            self.reducer = Reducer(
                self.units, self.collectives, reduce, self.device, reduce_once, reduce_dtype
            )
            for unit in self.units:
                unit.note_kept = note_kept
                guard(unit.memory, unit.in_arrays)
        self._saved = SavedTensors(self.units, self.arena)
        self.gradients = Gradients(
            self.units, self.groups, self.reducer, self.collectives.exchange_log
        )
        self.joint = JointSteps(self.units, self.gradients, self.collectives)
        notified = self._adopt_values, self.weights_changed, self.close
        self.access = Access(self.units, self.collectives, self.gradients, *notified)
        passes = (
            self.gradients,
            Agreement(self.units, self.collectives),
            self.buffers,
            self.joint,
            self._saved,
            self.access,
        )
        self.passes = Backward(self.units, *passes, self._adopt_flat_values, self._end_failed_pass)

    def close(self) -> None:
        """Take the hooks away. The values stay in the shards; another engine may take them over."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        WATCHING.discard(self._saved)
        ignore_runs(self.passes.told)

    def unshard(self) -> None:
        """Make the parameters ordinary again, full and in CPU memory of their own, and close;
        collective.
        """
        compare_notes(self.collectives)
        for unit in self.units:
            full = unit.values()
            for entry in unit.entries:
                unsettle(entry.parameter)
                entry.parameter.__class__ = entry.cls
                entry.parameter.data = full[entry.name].to("cpu", copy=True)
        self.close()

    def rounds(self, parameter: nn.Parameter) -> bool:
        """Whether a gather rounds it, to what autocast would or what travels."""
        chunks = (
            chunk
            for unit in self.units
            for chunk in unit.chunks
            if chunk.wire_dtype != chunk.master_dtype
        )
        return any(entry.parameter is parameter for chunk in chunks for entry in chunk.entries)

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
        self._saved.thread = self.passes.thread = get_ident()
        try:
            self.access.in_step = True
            self.access.held.keep()
            if gradients_over:
                self.gradients.take_away()
                self.access.held.keep()  # lets go of them
            if self._root is not None:
                self._root.use()
            with self._saved.watch():
                yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self.access.in_step = self.gradients.over = False
            self.arena.spilled = None
        if self._root is not None and self._root.pins:
            self._root.unuse()
        self.passes.end_step()

    def open_step(self) -> None:
        """What precedes the first operation of a step."""
        if self._lost:
            self.abandon()
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
        self.access.held.keep()
        self.passes.settle()
        self.access.held.adopt()
        self.access.held.follow_all()

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
        self._end_failed_pass()
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost

    def _end_failed_pass(self) -> None:
        for unit in tuple(self.arena.in_use):
            try:
                unit.abandon()
            except ResidencyError as error:  # a change in place that cannot be stored
                self._lost = self._lost or error
        self.passes.abandon()
        self.collectives.exchange_log.suspend_trace()
        self.arena.spilled = None

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
        with profile_range("optimizer begins", type(optimizer).__name__):
            if self._lost:
                self.abandon()
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
            self.access.held.follow_all()  # it may have scaled gradients
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
        self.reducer.apart.clear()
        for group in self._groups_of(optimizer):
            group.guard(guarded, self.gradients.make_way)

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
        """What the user wrote to parameters in use, to ``.data`` on one rank, or to flat tensors,
        becomes known.
        """
        for unit in tuple(self.arena.in_use):
            unit.keep_written()
        for unit in self.units if self.reducer.whole else ():
            unit.adopt()
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
        """Shards were written, of all parameters unless ``changed`` says which: nothing gathered of
        them before is true.
        """
        self.arena.spilled = None
        self.gradients.forget()
        by_unit: dict[int, list[Entry]] = {}
        for entry in (
            (entry for unit in self.units for entry in unit.entries) if changed is None else changed
        ):
            by_unit.setdefault(entry.unit, []).append(entry)
        for index, entries in by_unit.items():
            self.units[index].version += 1
            self.units[index].spread = self.units[index].spread and {}
            for entry in entries:
                entry.changed = self.units[index].version
            for number in self.units[index].numbers:
                take_back(number)
        for unit in tuple(self.arena.holders):
            if unit.index in by_unit:
                unit.refresh(by_unit[unit.index])

    # -------------------------------------------------------------------------------------- forward

    def _enter_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        if graph_task() != NO_GRAPH_TASK:
            self.passes.recompute(unit)
            return
        for group in unit.groups:
            # an optimizer's step is known; this is what the user wrote
            if group.version != group.public._version:
                self._adopt_flat_values()
        if self.collectives.exchange_log.writes_between_steps and not (
            self.access.in_step or unit.lent
        ):
            # where no rank but this one has stored anything, the next exchange of the others tells
            with apart():
                compare_notes(self.collectives)
        if hooks_refused() is not None and not unit.whole:
            enter_transformed(unit)
            return
        if not unit.use():
            # another unit in use has the memory, and each read gathers; or `gathered` has lent the
            # values
            return
        if not self.access.in_step or get_ident() != self._saved.thread:
            self._saved.enter_outside(unit)
        following = self._forward.enter(unit.index)
        if following is not None:
            self.units[following].gather(ahead=True)

    def _leave_forward(self, unit: Unit, module: nn.Module, args: Any, outputs: Any) -> Any:
        if hooks_refused() is not None and not unit.whole:
            leave_transformed(unit)
            return None
        if unit.lent or transform() is not None:
            # The values are the user's, or torch.func differentiates: its backward is none of ours,
            # and hooks would start one.
            if unit.pins and graph_task() == NO_GRAPH_TASK:
                unit.unuse()
            return None
        outputs, views = copy_views(outputs, self._saved.in_slot, copy_to_read)
        if self.inspect is not None:
            self.inspect(unit, outputs)
        if graph_task() != NO_GRAPH_TASK:
            watch_outputs(unit, outputs, self.passes.enter)
            return outputs if views else None
        if outputs is not None and torch.is_grad_enabled():
            # Outputs that need no gradient here (the input, returned; detached ones) may need one
            # on another rank.
            if watch_outputs(unit, outputs, self.passes.enter) or unit.trained:
                self.passes.coming.appendleft(unit.index)
        if not self.access.in_step or get_ident() != self._saved.thread:
            self._saved.leave_outside(unit)
        if unit.pins:
            if views:
                note(views, unit)  # the caller gets copies
            unit.unuse(failed=outputs is None and sys.exc_info()[0] is not None)
        return outputs if views else None
