"""All units of a model: what runs when, from the first forward to the end of backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..collectives import LocalCollectives
from ..support.torch_internals import (
    NO_GRAPH_TASK,
    DisableTorchFunctionSubclass,
    graph_task,
    hooks_refused,
    tracing_state,
    transform,
)
from .access import Access
from .agreement import compare_notes, describe_exchange
from .backward import Backward
from .buffers import Buffers
from .build import (
    Initialize,
    SlotDtype,
    build_units,
    check_memory,
    check_same_structure,
    fill_shards,
    trained_parameters,
)
from .chunk import Entry
from .forward_order import ForwardOrder
from .gradients import Gradients
from .hooks import install, take_gradients, watch_outputs
from .isolation import isolated
from .layout import overlap
from .module_tree import Structure
from .offload import Host, HostChunk, Offload, start_worker
from .partition import UnitPolicy, find_units
from .reduction import Reducer
from .saved_tensors import SavedTensors
from .sharded import ResidencyError, owners_of
from .stepping import OptimizerStep
from .streams import Stream
from .unit import BufferPool, Unit, pool_layout


class Zero3Engine(Access):
    """Shards a model's parameters, gradients and optimizer state over the ranks (ZeRO stage 3,
    arXiv 1910.02054).

    Engine and model hold each other, by hooks and by units. When nobody else holds either, Python's
    garbage collector frees the shards; `gc.collect()` does it at once.

    Args:
        model: any module; its parameters stay the same objects with the same names.
        optimizers: built on the parameters of ``model``; see :mod:`~.stepping`. Their options must
            be the same on all ranks, which the strategy checks.
        device: where shards, buffers and computation live.
        collectives: the communicator to the other ranks.
        unit_policy: see :func:`~.partition.find_units`.
        slot_dtype: dtype that a parameter is unsharded in, from its name and itself; its own by
            default.
        reduce_dtype: dtype in which fp32 gradients travel; they are added up in fp32 in any case.
        unit_class: a :class:`Unit`, perhaps one that checks what is done to it; not on one rank.
        reduce_once: make :meth:`accumulate` hold gradients; costs a full-size fp32 gradient on
            every rank.
        initialize: gets the parameters of a unit, with their names, and gives those on the meta
            device memory and values.
        offload: which shards live in host memory; not with collectives that are alone.

    Raises:
        ValueError: see :mod:`~.partition` and :mod:`~.build`.
    """

    units: list[Unit]
    inspect: Callable[[Unit, Any], None] | None = None  # looks at a unit's outputs
    around_step: Callable[[], AbstractContextManager[None]] = nullcontext  # entered by each step
    handles: list[RemovableHandle]  # of hooks, which go when it is closed

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        *,
        device: torch.device,
        collectives: LocalCollectives,
        unit_policy: UnitPolicy | None = None,
        slot_dtype: SlotDtype = lambda name, parameter: parameter.dtype,
        reduce_dtype: torch.dtype | None = None,
        reduce_once: bool = False,
        unit_class: type[Unit] = Unit,
        initialize: Initialize = lambda parameters: None,
        offload: Offload | None = None,
        streams: Callable[[torch.device], Stream] = Stream,
        worker: Callable[[torch.device], Executor] = start_worker,
    ) -> None:
        self.device, self.collectives = device, collectives
        trained = trained_parameters(model, optimizers)
        parts = find_units(model, unit_policy)
        self.units = build_units(parts, trained, slot_dtype, collectives, unit_class, offload)
        self.chunks = [chunk for unit in self.units for chunk in unit.chunks]
        hosted = [chunk for chunk in self.chunks if isinstance(chunk, HostChunk)]
        self.entries = {id(e.parameter): e for unit in self.units for e in unit.entries}
        self.trained_ids = trained
        check_memory(model)
        check_same_structure(self.units, model, optimizers, collectives)
        self.host = Host(offload, hosted, device, worker(device)) if offload and hosted else None
        earlier = owners_of(model.parameters())
        for owner in earlier:
            compare_notes(owner.collectives)
        fill_shards(self.units, collectives, device, initialize)
        for owner in earlier:
            owner.close()  # this engine has taken the parameters over
        self.buffers = Buffers(model, collectives, device)
        gather, reduce = streams(device), streams(device)
        for chunk in hosted:
            chunk.streams = gather, reduce
            chunk.entries[0].unit.hosted.append(chunk)
        layout = pool_layout(self.units, collectives.alone)
        # Allocated here and never again: the first forward may run under inference_mode, and CUDA
        # graphs need addresses.
        self.pool = BufferPool(collectives.allocate(layout.nbytes, device))
        places = dict(zip(self.units, layout.regions, strict=True))
        for unit, region in places.items():
            unit.connect(collectives, gather, self.pool, region.start)
            unit.rivals = {u for u, its in places.items() if u is not unit and overlap(its, region)}
        self.reducer = Reducer(
            self.units,
            collectives,
            reduce,
            device,
            reduce_once and not collectives.alone,
            None if collectives.alone else reduce_dtype,
        )
        collectives.exchange_log.describe = partial(describe_exchange, self.units)
        self.saved_tensors = SavedTensors(self.pool)
        self.gradients = Gradients(self.units, self.reducer.written, collectives.exchange_log)
        self.passes = Backward(
            self.units,
            self.gradients,
            self.reducer,
            collectives,
            self.buffers,
            self.pool,
            self.abandon,
        )
        self.own_parameters()
        self._forward = ForwardOrder()
        self._has_warned = False
        hooks = self._enter_forward, self._leave_forward
        self.handles = [handle for unit in self.units for handle in install(unit, *hooks)]
        self._taking = [
            handle for unit in self.units for handle in take_gradients(unit, self.passes.collector)
        ]
        self.steps = {optimizer: OptimizerStep(self, optimizer) for optimizer in optimizers}
        self.structure = Structure(model, self.buffers.look_again)

    # ------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Take the hooks away. The values stay in the shards; another engine may take them over."""
        self.end_run()
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for step in self.steps.values():
            step.close()

    def end_run(self) -> None:
        """Leave gradients to whom they come from: to another strategy, in `gathered`."""
        for handle in self._taking:
            handle.remove()
        self._taking = []

    def unshard(self) -> None:
        """Make the parameters ordinary again, full and in CPU memory of their own, and close;
        collective.
        """
        compare_notes(self.collectives)
        for unit in self.units:
            full = unit.values()
            for entry in unit.entries:
                del entry.parameter.zero3_entry
                entry.parameter.__class__ = entry.cls
                entry.parameter.data = full[entry.name].to("cpu", copy=True)
        self.close()

    def rounds(self, parameter: nn.Parameter) -> bool:
        """Whether an unshard rounds it, as autocast would."""
        chunk = self.entries[id(parameter)].chunk
        return chunk.dtype != chunk.master_dtype

    # --------------------------------------------------------------------------------------- a step

    @contextmanager
    def step(self, gradients_over: bool = False) -> Iterator[None]:
        """Around everything that runs the model: the forward and loss of a micro-batch, an
        evaluation step.

        ``gradients_over``: those of the last step will be cleared before the backward. On the CPU
        that is done here, so that activations have their memory.
        """
        if self.passes.in_step:
            yield
            return
        self.open_step()
        if not torch.is_grad_enabled():
            self.collectives.exchange_log.suspend_trace()  # no backward will come to compare it
        elif not self.pool.announce:
            self.collectives.exchange_log.resume_trace()
        try:
            self.passes.in_step = True
            if gradients_over:
                self.gradients.take_away()
            with self.around_step():
                yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self.passes.in_step = self.gradients.over = False
        self.passes.end_step()
        self.require_unwritten()

    def open_step(self) -> None:
        """What precedes the first operation of a step."""
        if self.passes.active:
            self.abandon()
        self.saved_tensors.leave(None)
        self.require_unwritten()
        for step in self.steps.values():
            step.abandon()
        self.structure.check()
        self.pool.store_written()
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
        self.saved_tensors.leave(None)
        for unit in self.units:
            unit.full_values = None
        with ExitStack() as stack:  # from below, also if a change in place cannot be stored
            stack.callback(self.collectives.exchange_log.suspend_trace)
            stack.callback(self.passes.abandon)
            for unit in self.pool.in_use:
                stack.callback(unit.abandon)

    # ----------------------------------------------------------------------------------- optimizers

    def begin_step(self, step: OptimizerStep) -> None:
        """An optimizer's own step begins, perhaps with a closure."""
        name = type(step.optimizer).__name__
        if graph_task() != NO_GRAPH_TASK:
            raise RuntimeError(
                f"{name} was stepped inside of a backward pass (in a hook of a parameter, for"
                f" instance), where gradients (of parameter {step.names()[0][0]!r} and others) have"
                " not been summed over the ranks. Step it after it."
            )
        for unit in self.units:
            if unit.has_own_values:
                unit.require_free()
        self.require_unwritten()
        self.pool.store_written()

    def wait_for_host(self) -> None:
        """Wait until the host has done what it has to do, and raise what failed there."""
        for chunk in self.chunks:
            chunk.wait_for_host()

    def gradient_norm(self, entries: Iterable[Entry]) -> Tensor:
        """The 2-norm [] of the gradients of ``entries``, in float64; collective."""
        self.passes.reduce_held()
        square = self.gradients.squared_norm(entries).to(self.device)
        return self.collectives.all_reduce(square).sqrt()

    # --------------------------------------------------------------------------------------- values

    def weights_changed(self, changed: Iterable[Entry] | None = None) -> None:
        """Shards were written, of all parameters unless ``changed`` says which: what was unsharded
        of them before is not true.
        """
        self.gradients.forget()
        entries = list(self.entries.values()) if changed is None else list(changed)
        self._warn_of_kept_views(entries)
        units = dict.fromkeys([entry.unit for entry in entries])
        for unit in units:
            unit.full_values = unit.full_values and {}
            if unit in self.pool.holders:
                unit.refresh()
        # autograd compares, where it has saved a weight
        increment_version([entry.parameter for entry in entries])
        with DisableTorchFunctionSubclass():
            for entry in entries:
                entry.seen = entry.parameter._version

    def _warn_of_kept_views(self, changed: list[Entry]) -> None:
        if self._has_warned or self.pool.is_captured:  # graphs hold views themselves
            return
        units = {entry.unit for entry in changed}
        for unit in units.intersection(self.pool.kept):
            if not unit.pins and unit.buffer.is_held():
                self._has_warned = True
                warnings.warn(
                    f"Somebody holds a view of a weight of unit {unit.name}, made in its forward,"
                    " while the weight changes: the view shows the value of before until the unit"
                    " is unsharded again. Keep a `.clone()`, or use the parameter itself.",
                    stacklevel=2,
                )
                return

    # -------------------------------------------------------------------------------------- forward

    def _enter_forward(self, unit: Unit, module: nn.Module, args: Any) -> None:
        is_outside = not (self.passes.in_step or unit.has_own_values)
        has_written = is_outside and self.collectives.exchange_log.writes
        if has_written and graph_task() == NO_GRAPH_TASK:
            # where no rank but this one has written anything, the next exchange of the others tells
            with isolated():
                compare_notes(self.collectives)
        if self.collectives.alone:
            return
        if unit.has_own_values:
            if hooks_refused() is None:
                self.saved_tensors.enter(unit)  # a backward may come when the values are gone
            return
        if hooks_refused() is not None or (unit.rounded and not _casts_to(unit.rounded)):
            # What a transform of torch.func saves of weights must stay as it is, and where no
            # autocast runs weights have full precision: each read is a copy of what is unsharded
            # here.
            unit.full_values = unit.full_values or unit.values()
            return
        if tracing_state() is not None:
            raise ResidencyError(
                f"{type(module).__name__} of unit {unit.name} is traced (`torch.jit.trace`,"
                " `add_graph`) while its parameters are sharded.\nTrace it inside of `with"
                " trainer.strategy.gathered(module):`, which all ranks enter."
            )
        unit.use()
        self.saved_tensors.enter(unit)
        # in a step that not all ranks run, only some would learn
        if graph_task() == NO_GRAPH_TASK and not self.pool.announce:
            following = self._forward.enter(unit.index)
            if following is not None:
                self.units[following].unshard(ahead=True)

    def _leave_forward(self, unit: Unit, module: nn.Module, args: Any, outputs: Any) -> None:
        if unit.has_own_values:
            self.saved_tensors.leave(unit)
            return
        if unit.full_values is not None or not unit.pins:
            unit.full_values = None
            return  # it never began
        if self.inspect is not None:
            self.inspect(unit, outputs)
        if self.collectives.alone:
            return  # units are reduced as their gradients need the memory of others
        self.saved_tensors.leave(unit)
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
