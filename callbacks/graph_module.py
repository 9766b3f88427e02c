"""Single modules as graphs, for models whose step cannot be captured as a whole."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..strategies.engine import Unit, Zero3Engine, bring, unit_around
from .graph_batch import StaticInputs, UnsupportedBatch, signature, tensors_in
from .graph_check import check_device, report
from .graph_device import CudaGraphs, SoftwareGraphs
from .graph_state import MAX_RECAPTURES, Guard, Snapshot
from .graph_watch import Problem, Shape, Watch


def in_checkpoint() -> bool:
    """Whether `torch.utils.checkpoint` runs the code that calls, for the first or the second time."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    again = torch._C._current_graph_task_id() != -1
    return again or (hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint")


def find_modules(root: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    """Modules whose names match one of ``patterns`` (``fnmatch``), outermost ones only.

    Raises:
        ValueError: a pattern matches nothing.
    """
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {n: m for n, m in root.named_modules() if n and fnmatchcase(n, pattern)}
        if not matching:
            raise ValueError(f"CUDAGraphStep(modules=[{pattern!r}]) matches no module of {type(root).__name__}.")
        found.update(matching)
    return {n: m for n, m in found.items() if not any(n.startswith(f"{other}.") for other in found)}


class _Token:
    """Lives as long as the autograd graph of one replay."""


class _CapturedCall:
    """Forward and backward of one module for inputs of one signature, in memory of their own."""

    def __init__(self, graphs: CudaGraphs | SoftwareGraphs, watch: Watch, unit: Unit | None) -> None:
        graphs = graphs.apart()  # between its forward and its backward other graphs are replayed
        self._forward, self._backward = graphs.make_pair(watch.generators, watch.random.offsets)
        self._watch, self._unit = watch, unit
        self._replay: weakref.ref[_Token] | None = None
        self.count = 0  # of replays

    def capture(self, forward: Callable[..., Any], inputs: Any, parameters: list[Tensor]) -> None:
        """Record ``forward`` of ``inputs``, (args, kwargs), and its backward, which is watched, too."""
        self._inputs = StaticInputs(inputs)
        args, kwargs = self._inputs.batch
        with self._forward.capture(), self._watch.random.following(forward=True):
            output = forward(*args, **kwargs)
        self._outputs = tensors_in(output)
        self._needs_grad = [t.requires_grad for t in self._outputs]
        ends = [t for t in self._outputs if t.requires_grad]
        self._seeds = [torch.zeros_like(t, requires_grad=False) for t in ends]
        self._starts = [t for t in [*tensors_in(self._inputs.batch), *parameters] if t.requires_grad]
        self._gradients: tuple[Tensor | None, ...] = ()
        if ends:
            with self._backward.capture(), self._watch.watching(None, forward=False):
                self._gradients = torch.autograd.grad(ends, self._starts, self._seeds, allow_unused=True)
        self._structure = apply_to_collection(output, Tensor, Tensor.detach)
        self._outputs = [t.detach() for t in self._outputs]

    @property
    def is_busy(self) -> bool:
        """A replay waits for its backward, which needs what lies in the graph's memory."""
        return self._replay is not None and self._replay() is not None

    def __call__(self, inputs: Any, parameters: list[Tensor]) -> Any:
        given = [t for t in [*tensors_in(inputs), *parameters] if t.requires_grad]
        results = iter(_Replay.apply(self, inputs, *given))
        return apply_to_collection(self._structure, Tensor, lambda _: next(results))

    def replay_forward(self, inputs: Any) -> tuple[list[Tensor], list[bool], _Token]:
        """Outputs in memory of their own; which need gradients; and what shows that they are needed."""
        self._inputs.fill(inputs)
        self._forward.replay()
        token = _Token()
        self._replay = weakref.ref(token)
        self.count += 1
        return [t.clone() for t in self._outputs], self._needs_grad, token

    def bring_weights(self) -> None:
        """In their slot is where the graphs read them."""
        if self._unit is not None:
            bring(self._unit)

    def replay_backward(self, gradients: tuple[Tensor, ...]) -> list[Tensor | None]:
        """Gradients of the inputs and parameters that need one."""
        for seed, gradient in zip(self._seeds, [g for g, n in zip(gradients, self._needs_grad, strict=True) if n], strict=True):
            seed.copy_(gradient)
        self._backward.replay()
        self._replay = None
        return [None if g is None else g.clone() for g in self._gradients]

    @property
    def input_nbytes(self) -> int:
        """Memory of the inputs of both graphs."""
        return self._inputs.nbytes + sum(t.nbytes for t in self._seeds)

    def reset(self) -> None:
        """Free the graphs."""
        self._forward.reset()
        self._backward.reset()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _CapturedCall, inputs: Any, *given: Tensor) -> tuple[Tensor, ...]:
        outputs, needs_grad, ctx.token = call.replay_forward(inputs)
        ctx.call, ctx.count = call, call.count
        ctx.mark_non_differentiable(*[t for t, needed in zip(outputs, needs_grad, strict=True) if not needed])
        ctx.save_for_backward(*[t for t in given if isinstance(t, nn.Parameter)])  # autograd compares their versions
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.call.bring_weights()
        _ = ctx.saved_tensors  # raises if weights were written since
        if ctx.count != ctx.call.count:
            raise RuntimeError("A captured module ran again before a second backward of its earlier run. Run backward first.")
        return None, None, *ctx.call.replay_backward(gradients)


class CapturedModule:
    """Stands in for the ``forward`` of a module while it trains.

    Args:
        name: of the module.
        module: to be captured.
        graphs: makes graphs.
        strategy: that it trains with.
        warmup: eager runs with inputs of one signature before the capture.
        max_graphs: signatures that are captured.
        refuse: is told why the module cannot be captured.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        graphs: CudaGraphs | SoftwareGraphs,
        strategy: Strategy,
        warmup: int,
        max_graphs: int,
        refuse: Callable[[list[Problem]], None],
    ) -> None:
        self._name, self._module, self._graphs, self._strategy = name, module, graphs, strategy
        self._warmup, self._max_graphs, self._refuse = warmup, max_graphs, refuse
        self._eager, self._own = module.forward, module.__dict__.get("forward")
        self._shapes: dict[Hashable, Shape] = {}
        self._guard: Guard | None = None
        self._names: set[str] = set()  # of attributes that its graphs depend on
        self._engine: Zero3Engine | None = None
        self._unit: Unit | None = None
        self._refused = False
        self.replays = self.recaptures = 0
        module.forward = self._run  # type: ignore[method-assign]

    def remove(self) -> None:
        """The module is as it was."""
        del self._module.forward
        if self._own is not None:
            self._module.forward = self._own  # type: ignore[method-assign]
        self._drop()

    @property
    def input_nbytes(self) -> int:
        """Memory of the inputs."""
        return sum(call.input_nbytes for call in self._captured())

    def _captured(self) -> list[_CapturedCall]:
        return [shape.graphs for shape in self._shapes.values() if shape.graphs is not None]

    def _drop(self) -> None:
        for call in self._captured():
            if not call.is_busy:  # else its backward comes, and frees it
                call.reset()
        self._shapes, self._guard, self._names = {}, None, set()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._refused or not torch.is_grad_enabled():
            return self._eager(*args, **kwargs)
        inputs, device = (args, kwargs), self._strategy.root_device.type
        try:
            key = signature(inputs, "inputs"), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            self._follow_engine()
        except (UnsupportedBatch, ValueError) as error:
            return self._give_up([Problem(str(error))], inputs)
        if self._guard is not None and self._guard.changed():
            self._drop()
            self.recaptures += 1
            if self.recaptures > MAX_RECAPTURES:
                return self._give_up([Problem(f"Its graphs went out of date {self.recaptures} times.")], inputs)
        shape = self._shapes.setdefault(key, Shape())
        if shape.watched < self._warmup:
            return self._watch(shape, inputs)
        if shape.graphs is None and len(self._captured()) >= self._max_graphs:
            return self._eager(*args, **kwargs)
        if shape.graphs is None:
            if problems := shape.problems():
                return self._give_up(problems, inputs)
            shape.graphs = self._capture(shape.watches[-1], inputs)
            if shape.graphs is None:
                return self._give_up(shape.watches[-1].problems, inputs)
        if shape.graphs.is_busy:
            return self._eager(*args, **kwargs)  # it runs twice before a backward
        self.replays += 1
        return shape.graphs(inputs, list(self._module.parameters()))

    def _follow_engine(self) -> None:
        engine = getattr(self._strategy, "engine", None)
        if engine is not None and engine is not self._engine:  # optimizers with other groups of parameters have another one
            self._drop()
            self._engine, self._unit = engine, unit_around(engine, self._module)
        if self._unit is not None and not self._unit.pins:
            raise ValueError("it reads weights that are not gathered while it runs.")
        if in_checkpoint():
            raise ValueError("a checkpoint runs it, and again in the backward. Put the checkpoint inside of the module.")

    def _watch(self, shape: Shape, inputs: Any) -> Any:
        watch, snapshot = Watch(self._strategy.root_device, inputs), Snapshot(self._module)
        with watch.watching(None, forward=True):
            output = self._eager(*inputs[0], **inputs[1])
        watch.add_changes(snapshot.changes())
        shape.add(watch)
        return output

    def _capture(self, watch: Watch, inputs: Any) -> _CapturedCall | None:
        """None if the backward does what a graph cannot repeat; ``watch`` knows what."""
        call = _CapturedCall(self._graphs, watch, self._unit)
        try:
            call.capture(self._eager, inputs, list(self._module.parameters()))
        except RuntimeError:
            if not watch.problems:
                raise
        if watch.problems:
            call.reset()
            return None
        self._names |= watch.names
        self._guard = Guard(self._module, [], self._names)
        return call

    def _give_up(self, problems: list[Problem], inputs: Any) -> Any:
        self._refused = True
        self._drop()
        self._refuse([Problem(f"Module {self._name!r}: {p.what}", p.place) for p in problems])
        return self._eager(*inputs[0], **inputs[1])


class ModulesRunner:
    """Captures single modules during a fit; see :class:`~.graph_runner.StepRunner`.

    Args:
        trainer: that trains.
        root: that is trained.
        graphs: makes graphs.
        patterns: see :func:`find_modules`.
        warmup: eager runs of a module with inputs of one signature before its capture.
        max_graphs: signatures that are captured of each module.
        strict: raise where a module cannot be captured, instead of going on eagerly.
    """

    def __init__(
        self,
        trainer: Trainer,
        root: LightningModule,
        graphs: CudaGraphs | SoftwareGraphs,
        patterns: list[str],
        warmup: int,
        max_graphs: int,
        strict: bool,
    ) -> None:
        self._trainer, self._root, self._graphs, self._patterns = trainer, root, graphs, patterns
        self._warmup, self._max_graphs, self._strict = warmup, max_graphs, strict
        self.captured: dict[str, CapturedModule] = {}

    def install(self) -> None:
        """From now on the modules run through this object."""
        self._graphs.enter()
        problems, strategy = check_device(self._trainer), self._trainer.strategy
        modules = find_modules(self._root, self._patterns)
        if problems:
            self._refuse(problems)
            return
        for name, module in modules.items():
            self.captured[name] = CapturedModule(
                name, module, self._graphs, strategy, self._warmup, self._max_graphs, self._refuse
            )

    def _refuse(self, problems: list[Problem]) -> None:
        report("a module cannot be captured", problems, "It runs without a graph.", self._strict)

    def remove(self) -> None:
        """The graphs go, and everything is as it was."""
        for captured in self.captured.values():
            captured.remove()
        self._graphs.renew()
        self._graphs.leave()

    def memory_bytes(self) -> dict[str, int]:
        """See :meth:`CUDAGraphStep.memory_bytes`."""
        inputs = sum(captured.input_nbytes for captured in self.captured.values())
        return {"pool": self._graphs.pool_nbytes(), "inputs": inputs, "gradients": 0}

    def summary(self) -> str:
        """One line on the run."""
        counts = ", ".join(f"{name} {captured.replays} times" for name, captured in self.captured.items())
        return f"CUDAGraphStep: replayed {counts or 'nothing'}"
