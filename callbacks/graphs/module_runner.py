"""Single modules as graphs, for models whose step cannot be captured as a whole."""

from __future__ import annotations

from collections.abc import Hashable
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from ...strategies.engine import Unit, Zero3Engine, unit_around
from .captured_module import CapturedCall
from .compare import Shape, compare
from .device import CudaGraphs, SoftwareGraphs
from .limits import MOST_SIGNATURES, TOO_MANY, Recaptures
from .module_state import Guard, Snapshot
from .preconditions import check_device, check_strategy_of_modules
from .ranks import GraphRanks
from .software_graph import CaptureError, memory_of
from .static_inputs import UnsupportedBatch, signature
from .watch import Problem, Watch


def in_checkpoint() -> bool:
    """Whether `torch.utils.checkpoint` runs the code that calls, for the first or the second
    time.
    """
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
            raise ValueError(
                f"CUDAGraphStep(modules=[{pattern!r}]) matches no module of {type(root).__name__}."
            )
        found.update(matching)
    return {n: m for n, m in found.items() if not any(n.startswith(f"{other}.") for other in found)}


class CapturedModule:
    """Stands in for the ``forward`` of a module while it trains.

    Args:
        name: of the module.
        module: to be captured.
        graphs: makes graphs.
        trainer: that trains.
        warmup: eager runs with inputs of one signature before the capture.
        max_graphs: signatures that are captured.

    Attributes:
        problems: see :class:`~.graph_ranks.Part`.
        refused: on this rank at least, which then runs it eagerly.
        replays: of its graphs.
    """

    kind = "a module"

    def __init__(
        self,
        name: str,
        module: nn.Module,
        graphs: CudaGraphs | SoftwareGraphs,
        trainer: Trainer,
        warmup: int,
        max_graphs: int,
    ) -> None:
        self._name, self._module, self._graphs = name, module, graphs
        self._trainer, self._strategy = trainer, trainer.strategy
        self._warmup, self._max_graphs = warmup, max_graphs
        self._eager, self._own = module.forward, module.__dict__.get("forward")
        self._shapes: dict[Hashable, Shape] = {}
        self._guard: Guard | None = None
        self._names: set[str] = set()  # of attributes that its graphs depend on
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}  # likewise
        self._engine: Zero3Engine | None = None
        self._unit: Unit | None = None
        self.problems, self.refused = list[str](), False
        self._outdated = Recaptures(warmup)
        self.replays = 0
        module.forward = self._run  # type: ignore[method-assign]

    def remove(self) -> None:
        """The module is as it was."""
        del self._module.forward
        if self._own is not None:
            self._module.forward = self._own  # type: ignore[method-assign]
        self._drop()

    @property
    def recaptures(self) -> int:
        """How often its graphs went out of date."""
        return self._outdated.count

    @property
    def input_nbytes(self) -> int:
        """Memory of the inputs."""
        return sum(call.input_nbytes for call in self._captured())

    def _captured(self) -> list[CapturedCall]:
        return [shape.graphs for shape in self._shapes.values() if shape.graphs is not None]

    def _drop(self) -> None:
        for call in self._captured():
            if not call.is_busy:  # else its backward comes, and frees it
                call.reset()
        self._shapes, self._guard, self._names, self._globals = {}, None, set(), {}

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.refused or not torch.is_grad_enabled():
            return self._eager(*args, **kwargs)
        inputs, device = (args, kwargs), self._strategy.root_device.type
        try:
            key = (
                signature(inputs, "inputs"),
                torch.is_autocast_enabled(device),
                torch.get_autocast_dtype(device),
            )
            self._follow_engine()
        except (UnsupportedBatch, ValueError) as error:
            return self._give_up([Problem(str(error))], inputs)
        if self._unit is not None and self._unit.lent:
            # inside of `gathered`: weights are elsewhere, until it ends
            return self._eager(*args, **kwargs)
        if self._guard is not None and self._guard.changed():
            self._recapture()
        shape = None if self.refused else self._shape(key)
        return self._eager(*args, **kwargs) if shape is None else self._run_shape(shape, inputs)

    def _shape(self, key: Hashable) -> Shape | None:
        """What is known of inputs with this signature; None if they run eagerly."""
        shape, captured = self._shapes.get(key), len(self._captured())
        if (shape is None or shape.graphs is None) and captured >= self._max_graphs:
            return None
        if shape is None and len(self._shapes) >= MOST_SIGNATURES:
            if not captured:
                self._stop([Problem(TOO_MANY)])
            return None
        return self._shapes.setdefault(key, Shape(batch=self._batch()))

    def _batch(self) -> int:
        return self._trainer.fit_loop.epoch_loop.total_batch_idx

    def _run_shape(self, shape: Shape, inputs: Any) -> Any:
        args, kwargs = inputs
        if shape.watched < self._warmup or shape.epoch != self._trainer.current_epoch:
            return self._watch(shape, inputs)
        given = shape.watches[-1].given
        # from this epoch on
        if shape.graphs is not None and any(given) and given != shape.graphs.given:
            self._recapture()
            return self._eager(*args, **kwargs)
        if shape.graphs is None:
            if given and not any(given):  # its backward is to come, or there was none
                if self._batch() - shape.batch < 5 * self._warmup:
                    return self._watch(shape, inputs)
                what = (
                    "No backward comes to what it returns. Where nobody needs one, run it in"
                    " `torch.no_grad()`."
                )
                return self._give_up([Problem(what)], inputs)
            if problems := shape.problems():
                return self._give_up(problems, inputs)
            shape.graphs = self._capture(shape.watches[-1], inputs)
            if shape.graphs is None:
                return self._give_up(shape.watches[-1].problems, inputs)
            if len(self._captured()) == self._max_graphs:  # what is known of others is of no use
                self._shapes = {
                    key: each for key, each in self._shapes.items() if each.graphs is not None
                }
        if shape.graphs.is_busy:
            return self._eager(*args, **kwargs)  # it runs twice before a backward
        self.replays += 1
        return shape.graphs(inputs, list(self._module.parameters()))

    def _recapture(self) -> None:
        """Drop the graphs; there may be others."""
        self._drop()
        if not self._outdated.add(self.replays):
            times = self._outdated.in_vain
            self._stop(
                [
                    Problem(
                        f"Its graphs went out of date {times} times, each time before they had"
                        " paid."
                    )
                ]
            )

    def _settle(self) -> None:
        for unit in () if self._engine is None else tuple(self._engine.arena.holders):
            unit.arrive()

    def _follow_engine(self) -> None:
        engine = getattr(self._strategy, "engine", None)
        # optimizers with other groups of parameters have another one
        if engine is not None and engine is not self._engine:
            self._drop()
            self._engine, self._unit = engine, unit_around(engine, self._module)
        if self._unit is not None and not (self._unit.pins or self._unit.lent):
            raise ValueError("it reads weights that are not gathered while it runs.")
        if in_checkpoint():
            raise ValueError(
                "a checkpoint runs it, and again in the backward. Put the checkpoint inside of the"
                " module."
            )

    def _watch(self, shape: Shape, inputs: Any) -> Any:
        watch, snapshot = Watch(self._strategy.root_device, inputs), Snapshot(self._module)
        exchange_log = [] if self._engine is None else self._engine.collectives.exchange_log.trace
        before = len(exchange_log)
        with watch.watching(None, forward=True):
            output = watch.note_output(self._eager(*inputs[0], **inputs[1]), self._eager)
        watch.add_changes(snapshot.changes())
        if watch.exchanges or len(exchange_log) != before:
            watch.add(
                "It exchanges something with other ranks, which need not capture it at the same"
                " time.",
                watch.exchanges,
            )
        watch.follow_gradients(output)
        shape.add(watch, self._trainer.current_epoch)
        if shape.graphs is not None and (watch.problems or compare(*shape.watches)):
            self._recapture()
        return output

    def _capture(self, watch: Watch, inputs: Any) -> CapturedCall | None:
        """None if the backward does what a graph cannot repeat; ``watch`` knows what."""
        call = CapturedCall(self._name, self._graphs, watch, self._settle)
        try:
            call.capture(self._eager, inputs, self._module)
        except CaptureError:
            if not watch.problems:
                raise
        except RuntimeError as error:  # of CUDA, which after it has no more to give
            what = (
                f"Capturing module {self._name!r} failed. Leave it out of"
                " `CUDAGraphStep(modules=...)`."
            )
            raise RuntimeError(what) from error
        else:
            self._check_leaves(call, watch)
        if watch.problems:
            call.reset()
            return None
        self._names |= watch.names
        self._globals |= watch.globals
        self._guard = Guard(self._module, [], self._names, self._globals.values())
        return call

    def _check_leaves(self, call: CapturedCall, watch: Watch) -> None:
        """Weights of others may not get their gradients inside."""
        names = {id(p): name for name, p in self._trainer.lightning_module.named_parameters()}
        own = set(map(memory_of, self._module.parameters()))
        for leaf in call.others:
            name = names.get(id(leaf))
            # else the program made it, and drops it
            if name is not None or memory_of(leaf) in watch.sources - own:
                what = (
                    f"It computes with {name or f'a tensor of shape {list(leaf.shape)}'}, which is"
                    " none of its parameters:"
                )
                remedy = "Pass it to `forward`, or capture a module that has both."
                watch.add(f"{what} its gradient would be lost. {remedy}", watch.program)

    def refuse(self) -> None:
        """From now on it runs eagerly."""
        self.refused = True
        self._drop()

    def _stop(self, problems: list[Problem]) -> None:
        """All ranks will do so before the next micro-batch, when they hear of it."""
        self.refuse()
        self.problems = [f"Module {self._name!r}: {problem}" for problem in problems]

    def _give_up(self, problems: list[Problem], inputs: Any) -> Any:
        self._stop(problems)
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
        self._warmup, self._max_graphs, self._ranks = (
            warmup,
            max_graphs,
            GraphRanks(trainer, strict),
        )
        self.captured: dict[str, CapturedModule] = {}

    def install(self) -> None:
        """From now on the modules run through this object."""
        self._graphs.enter()
        problems = [*check_device(self._trainer), *check_strategy_of_modules(self._trainer)]
        modules = find_modules(self._root, self._patterns)
        if not self._ranks.have_none(problems):
            self._ranks.report(CapturedModule.kind, problems)
            return
        for name, module in modules.items():
            self.captured[name] = CapturedModule(
                name, module, self._graphs, self._trainer, self._warmup, self._max_graphs
            )

    def agree(self) -> None:
        """Before each micro-batch and after the last: what one rank has refused since is refused by
        all.

        Which shapes of inputs are captured, and when, each rank decides by its own inputs: nothing
        is exchanged inside of a module, and ranks may run it another number of times.
        """
        # the same on all ranks
        parts = [each for each in self.captured.values() if each.problems or not each.refused]
        if parts:
            refusing = zip(
                *self._ranks.gather([bool(each.problems) for each in parts]), strict=True
            )
            self._ranks.refuse(parts, refusing)

    def remove(self) -> None:
        """The graphs go, and everything is as it was."""
        for captured in self.captured.values():
            captured.remove()
        self._graphs.renew()
        self._graphs.leave()

    @property
    def input_nbytes(self) -> int:
        """Memory of the inputs."""
        return sum(captured.input_nbytes for captured in self.captured.values())

    def memory_bytes(self) -> dict[str, int]:
        """See :meth:`CUDAGraphStep.memory_bytes`."""
        return {"pool": self._graphs.pool_nbytes(), "inputs": self.input_nbytes, "gradients": 0}

    def summary(self) -> str:
        """One line on the run."""
        counts = ", ".join(
            f"{name} {captured.replays} times" for name, captured in self.captured.items()
        )
        return f"CUDAGraphStep: replayed {counts or 'nothing'}"
