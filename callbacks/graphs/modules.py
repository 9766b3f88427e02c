"""`CapturedModule`: a single module as graphs, for models whose step is not captured as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version, saved_tensors_hooks

from ...strategies.engine import ShardedParameter, unit_around
from .compare import tensors_in
from .fingerprint import address
from .program import (
    Books,
    Captured,
    EagerRun,
    Fit,
    NotCapturable,
    Program,
    Record,
    Run,
    leaves_of,
    signature,
)


def find_modules(root: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    """Return the outermost modules whose names match one of ``patterns`` (``fnmatch``), by name.

    Raises:
        ValueError: a pattern matches no module.
    """
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {n: m for n, m in root.named_modules() if n and fnmatchcase(n, pattern)}
        if not matching:
            raise ValueError(
                f"CUDAGraphStep(modules=[{pattern!r}]) matches no module of {type(root).__name__}."
            )
        found.update(matching)
    return {n: m for n, m in found.items() if not any(n.startswith(f"{other}.") for other in found)}


def in_checkpoint() -> bool:
    """Return whether the caller runs in `torch.utils.checkpoint`, the first or second time."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    is_backward = torch._C._current_graph_task_id() != -1
    return is_backward or (hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint")


class ModuleBooks(Books):
    """What surrounds captures and replays of a module, which adds to no gradients.

    A backward gets the values of sharded weights from autograd, as an eager backward does. So ranks
    need not agree on which calls they capture and when: around each call all of them gather and
    reduce the same.

    Args:
        module: the module.
        engine: the engine of `zero3`, if there is one.
        given: for each output, whether the backward gets a gradient of it.

    Attributes:
        saved: the parameters whose values autograd saved for the backward, themselves or as views.
        values: values of these for the next replay of the backward. They may have been gathered
            into other memory than the graph reads.
    """

    def __init__(self, module: nn.Module, engine: Any, given: list[bool]) -> None:
        self.given = given
        self.module, self._units = module, [] if engine is None else engine.units
        self.saved, self.values = list[Tensor](), tuple[Tensor, ...]()
        self._overwritten: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def capture_forward(self) -> Iterator[None]:
        """Wrap the captured forward; hooks for saved tensors that others have set are called."""
        versions = [(buffer, buffer._version) for buffer in self.module.buffers()]
        places = [(p, address(p)) for p in self.module.parameters()]
        pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (
            lambda t: t,
            lambda t: t,
        )
        saved = set[Tensor]()

        def note_and_pack(tensor: Tensor) -> Any:
            saved.update(p for p, place in places if 0 <= address(tensor) - place < p.nbytes)
            return pack(tensor)

        # hazard: the graph would always read casts of an earlier run, made of this step's weights;
        # a later run would find the graph's.
        torch.clear_autocast_cache()
        with saved_tensors_hooks(note_and_pack, unpack):
            yield
        torch.clear_autocast_cache()
        self._written = [buffer for buffer, version in versions if buffer._version != version]
        self.saved = [p for p, _ in places if p in saved]
        # Where the graph reads them. Torch's own `data`, not that of a subclass: values that a
        # replay writes there are no change of the parameter.
        with torch._C.DisableTorchFunctionSubclass():
            self._places = [p.data for p in self.saved]

    def end_forward(self) -> None:
        """The engine's code that keeps buffers equal on all ranks sees writes by versions."""
        increment_version(self._written)

    def begin_backward(self, parameters: list[Tensor]) -> None:
        """Put the weights where the graph reads them."""
        pairs = zip(self._places, self.values, strict=bool(self.values))
        moved = [(place, value) for place, value in pairs if address(place) != address(value)]
        # hazard: another unit may be in the memory that the graph reads; its weights may still
        # arrive, or other ranks may read them.
        for unit in self._units if moved else ():
            unit.wait()
        self._overwritten = [(place, place.clone()) for place, _ in moved]
        for place, value in moved:
            place.copy_(value)

    def end_backward(self) -> None:
        """Restore what was there."""
        for place, values in self._overwritten:
            place.copy_(values)


class CapturedCall(Captured):
    """Forward and backward of one module.

    Attributes:
        user: the run that needs the graphs' memory, until it has died.
        places: the addresses of the parameters.
    """

    user: weakref.ref[_Call] | None = None

    def _choose_ends(self, outputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        parameters, given = list(self.books.module.parameters()), self.books.given
        self.places = list(map(address, parameters))
        leaves = [t for t in [*self._static_inputs, *parameters] if t.requires_grad]
        return [t for t, is_given in zip(outputs, given, strict=True) if is_given], leaves

    def _differentiate(self) -> None:
        self.leaf_grads = torch.autograd.grad(
            self._roots, self._leaves, self._root_grads, allow_unused=True
        )

    @property
    def is_busy(self) -> bool:
        """Whether the backward of a run still needs the graphs' memory."""
        user = None if self.user is None else self.user()
        return user is not None and not user.is_over

    def reset(self) -> None:
        """Free the graphs, unless a backward still needs them; autograd's node frees those."""
        if not self.is_busy:
            super().reset()


class _Call:
    """One run of a module as a node of autograd's graph: replayed, or eager, beside a replay.

    Args:
        program: the program of the module, whose problems get the first difference.
        record: the runs with such inputs, and their graphs.
        eager: the eager run; None for a replay.
        sources: the tensors that the eager run gets gradients of.

    Attributes:
        is_over: whether its backward has run.
    """

    def __init__(
        self,
        program: CapturedModule,
        record: Record,
        eager: EagerRun | None = None,
        sources: Sequence[Tensor] = (),
    ) -> None:
        self._program, self._record, self._eager = program, record, eager
        self._graphs: CapturedCall | None = record.graphs
        self._sources, self.is_over = sources, False
        # With sharded weights an eager run has saved what the engine gathers again.
        self.saved = [] if record.graphs is None else record.graphs.books.saved
        if record.graphs is not None:
            record.graphs.user = weakref.ref(self)

    def run(self, output: Any, inputs: Any, foreign: Sequence[Tensor] = ()) -> Any:
        """Return ``output``, which the module returned for ``inputs``, with a history.

        Other leaves of this history, ``foreign``, are no inputs and no parameters of the module.
        """
        self._foreign, self.outputs = list(foreign), tensors_in(output)
        self.requires_grad = [t.requires_grad for t in self.outputs]
        if self._graphs is not None:
            self.requires_grad = self._graphs.requires_grad
        candidates = [*tensors_in(inputs), *self._program.module.parameters()]
        leaves = [t for t in candidates if t.requires_grad] + self._foreign
        results = iter(_Node.apply(self, *leaves))
        return apply_to_collection(output, Tensor, lambda _: next(results))

    def backward(self, grads: tuple[Tensor | None, ...], weights: tuple[Tensor, ...]) -> Any:
        """Return the gradients of inputs and parameters that require one.

        Raises:
            RuntimeError: other outputs get gradients than in the eager runs, or the module ran
                again meanwhile.
        """
        graphs, eager, given = self._graphs, self._eager, [g is not None for g in grads]
        root_grads, name = [g for g in grads if g is not None], self._program.name
        if graphs is not None:
            if graphs.user is None or graphs.user() is not self:
                raise RuntimeError(
                    f"{name}, which is captured, ran again before a second backward of its earlier"
                    " run. Run backward first."
                )
            graphs.books.values = weights
        self.is_over = True
        if eager is None:
            assert graphs is not None
            if graphs.books.given != given:
                raise RuntimeError(
                    f"{name}: other outputs get gradients now than in its eager runs. Leave it out"
                    " of `CUDAGraphStep(modules=...)`."
                )
            graphs.repeat_backward(root_grads)
            return [None if g is None else g.clone() for g in graphs.leaf_grads]
        roots = [t for t, is_given in zip(self.outputs, given, strict=True) if is_given]
        found: list[Tensor | None] = []

        def differentiate() -> None:
            # Retained, as the user's backward may be.
            sources = [*self._sources, *self._foreign]
            found[:] = torch.autograd.grad(
                roots, sources, root_grads, retain_graph=True, allow_unused=True
            )
            eager.leaf_grads = found[: len(self._sources)]

        eager.root_grads = root_grads
        eager.backward(differentiate)
        if graphs is None:
            self._record.given = given
        else:
            difference: str | None = "other outputs get gradients than in its earlier runs"
            if graphs.books.given == given:
                places = list(map(address, self._program.module.parameters()))
                # Weights of `zero3` may lie elsewhere for once: then the next run is compared.
                difference = graphs.compare(eager) if places == graphs.places else None
            if difference is not None:
                self._program.problems.append(
                    f"An eager run and its replay are not the same: {difference}"
                )
        return found


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.call, outputs = call, [t.detach().clone() for t in call.outputs]
        pairs = zip(outputs, call.requires_grad, strict=True)
        ctx.mark_non_differentiable(*[t for t, needed in pairs if not needed])
        ctx.set_materialize_grads(False)
        # Autograd compares the versions of saved tensors; the engine of `zero3` gathers them again.
        ctx.save_for_backward(*call.saved)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        weights = ctx.saved_tensors  # raises if one of them was written since the forward
        return None, *ctx.call.backward(grads, weights)


class CapturedModule(Program):
    """Replaces the ``forward`` of a module during a fit.

    Each rank decides by its own inputs which signatures it captures, and when: modules exchange
    nothing inside, and ranks may run them different numbers of times.

    Args:
        name: the module's name.
        module: the module to be captured.
        fit: the fit.
    """

    def __init__(self, name: str, module: nn.Module, fit: Fit) -> None:
        super().__init__(f"module {name!r}", fit, module, "forward")
        self._engine: Any = None
        self._needs_unit = False  # its weights are sharded, and unsharded while it runs
        self._eager_forward, self._own_forward = module.forward, vars(module).get("forward")
        vars(module)["forward"] = self._forward

    def uninstall(self) -> None:
        """Restore the module's ``forward`` and free the graphs."""
        del vars(self.module)["forward"]
        if self._own_forward is not None:
            vars(self.module)["forward"] = self._own_forward
        self.drop()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        run, record = Run.PLAIN, Record()
        if not self.is_eager and torch.is_grad_enabled():
            try:
                run, record = self._choose((args, kwargs))
            except NotCapturable as error:
                self.problems.append(str(error))
        graphs = record.graphs
        if run is Run.CAPTURE:
            graphs = self._capture(record, (args, kwargs))
        if self.problems or run is Run.PLAIN:
            self.is_eager |= bool(self.problems)  # the other ranks follow before the next batch
            return self._eager_forward(*args, **kwargs)
        if run is Run.WATCH and not record.watched:
            for name, parameter in self.module.named_parameters():
                if parameter._backward_hooks:
                    self.problems.append(f"Parameter {name} has a hook, which would run twice.")
            # Without a node around it, which in-place changes of inputs do not bear.
            return self.run_eagerly(record, self._eager_forward, args, kwargs)[1]
        if graphs is not None and run is not Run.CAPTURE:
            graphs.copy_inputs((args, kwargs))
        if run not in (Run.WATCH, Run.VERIFY):
            self.replays += 1
            graphs.repeat_forward()
            graphs.log()
            return _Call(self, record).run(graphs.output, (args, kwargs))
        inputs = apply_to_collection(
            (args, kwargs), Tensor, lambda t: t.detach().requires_grad_(t.requires_grad)
        )
        eager, output = self.run_eagerly(record, self._eager_forward, *inputs)
        candidates = [*tensors_in(inputs), *self.module.parameters()]
        sources = [t for t in candidates if t.requires_grad]
        known = set(map(id, sources))
        foreign = [t for t in leaves_of(*tensors_in(output)) if id(t) not in known]
        for name, parameter in self.fit.root.named_parameters():
            if any(parameter is leaf for leaf in foreign):
                self.problems.append(
                    f"It computes with {name}, which is none of its parameters: its gradient would"
                    " be lost. Pass it to `forward`, or capture a module that has both."
                )
        return _Call(self, record, eager, sources).run(output, (args, kwargs), foreign)

    def _choose(self, inputs: Any) -> tuple[Run, Record]:
        """Return how to run the module, and the record of its inputs.

        Raises:
            NotCapturable: it cannot be captured where it runs now, or with these inputs.
        """
        engine, parameters = self.fit.engine, list(self.module.parameters())
        # `Zero3Strategy` makes another engine for optimizers with other groups of parameters.
        if engine is not self._engine:
            self.drop()
            self._engine = engine
            try:
                self._needs_unit = unit_around(engine, self.module) is not None
            except ValueError as error:
                raise NotCapturable(str(error)) from error
        if self._needs_unit and any(isinstance(p, ShardedParameter) for p in parameters):
            raise NotCapturable("it reads weights that are not gathered while it runs.")
        if in_checkpoint():
            raise NotCapturable(
                "a checkpoint runs it, and again in the backward. Put the checkpoint inside of the"
                " module."
            )
        places, device = list(map(address, parameters)), self.fit.device.type
        if self._needs_unit and any(each.places != places for each in self.graphs):
            return Run.PLAIN, Record()  # they lie elsewhere for once, as inside of `gathered`
        if changes := self.changes():
            self.recapture(changes)
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        key = signature(inputs), autocast
        known = self.records.get(key, Record())
        if known.graphs is not None and known.graphs.is_busy:
            return Run.PLAIN, known  # it runs twice before a backward
        run, record = self.choose(key)
        if run is Run.CAPTURE and not any(record.given):
            run = Run.WATCH  # the backward of the last run is still to come, or there was none
        return run, record

    def _capture(self, record: Record, inputs: Any) -> CapturedCall:
        fit, books = self.fit, ModuleBooks(self.module, self._engine, record.given)
        # hazard: between this forward and its backward other graphs are replayed, which would
        # overwrite a shared pool.
        pair = fit.graphs.make_pair(record.offsets, own_pool=True)
        call = CapturedCall(
            self.name, pair, books, fit.root, self.states, self._eager_forward, inputs
        )
        call.capture_backward()
        self.add(record, call)
        return call
