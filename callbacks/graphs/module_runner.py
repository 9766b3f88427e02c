"""`ModulesRunner` captures single modules, for models whose step cannot be captured as a whole."""

from __future__ import annotations

from collections.abc import Hashable
from fnmatch import fnmatchcase
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from ...strategies.engine import Unit, Zero3Engine, is_sharded, unit_around
from .captured_module import CapturedCall
from .compare import SignatureRecord, compare
from .device import CudaGraphs, SoftwareGraphs
from .limits import MOST_SIGNATURES, TOO_MANY, Recaptures
from .module_state import Guard, Snapshot
from .preconditions import check_device, check_strategy_of_modules
from .ranks import GraphRanks
from .software_graph import CaptureError, memory_of
from .static_inputs import UnsupportedBatch, signature
from .watch import Problem, Watch


def in_checkpoint() -> bool:
    """Return whether the caller runs in `torch.utils.checkpoint`, the first or second time."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    is_backward = torch._C._current_graph_task_id() != -1
    return is_backward or (hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint")


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


class CapturedModule:
    """Replaces the ``forward`` of a module during a fit.

    Args:
        name: the module's name.
        module: the module to be captured.
        graphs: makes the graphs.
        trainer: the trainer of the fit.
        warmup: eager runs with inputs of one signature before the capture.
        max_graphs: number of signatures that are captured.

    Attributes:
        problems: see :class:`~.ranks.Part`.
        is_eager: whether this rank runs the module eagerly from now on.
        replays: number of replayed forwards.
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
        self._eager_forward, self._own_forward = module.forward, module.__dict__.get("forward")
        self._records: dict[Hashable, SignatureRecord] = {}
        self._guard: Guard | None = None
        self._names: set[str] = set()  # names of attributes that the graphs depend on
        # Globals that the graphs depend on: by table and name, the same again.
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._engine: Zero3Engine | None = None
        self._unit: Unit | None = None
        self.problems, self.is_eager = list[str](), False
        self._recaptures = Recaptures(warmup)
        self.replays = 0
        module.forward = self._run  # type: ignore[method-assign]

    def uninstall(self) -> None:
        """Restore the module's ``forward`` and free the graphs."""
        del self._module.forward
        if self._own_forward is not None:
            self._module.forward = self._own_forward  # type: ignore[method-assign]
        self._drop_graphs()

    @property
    def recaptures(self) -> int:
        """How often the graphs went out of date."""
        return self._recaptures.count

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs of all graphs."""
        return sum(call.input_nbytes for call in self._captured_calls())

    def _captured_calls(self) -> list[CapturedCall]:
        return [record.graphs for record in self._records.values() if record.graphs is not None]

    def _drop_graphs(self) -> None:
        for call in self._captured_calls():
            # hazard: the backward of a busy call still needs the graph; autograd's node frees it.
            if not call.is_busy:
                call.reset()
        self._records, self._guard, self._names, self._globals = {}, None, set(), {}

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_eager or not torch.is_grad_enabled():
            return self._eager_forward(*args, **kwargs)
        inputs, device = (args, kwargs), self._strategy.root_device.type
        try:
            key = (
                signature(inputs, "inputs"),
                torch.is_autocast_enabled(device),
                torch.get_autocast_dtype(device),
            )
            self._check_engine()
        except (UnsupportedBatch, ValueError) as error:
            return self._stop_and_run([Problem(str(error))], inputs)
        if self._unit is not None and self._unit.lent:
            # Inside of `gathered`, whose weights lie elsewhere until it ends.
            return self._eager_forward(*args, **kwargs)
        if self._guard is not None and self._guard.changed():
            self._recapture()
        record = None if self.is_eager else self._find_record(key)
        if record is None:
            return self._eager_forward(*args, **kwargs)
        return self._run_record(record, inputs)

    def _find_record(self, key: Hashable) -> SignatureRecord | None:
        """Return the record of inputs with this signature; None if they run eagerly."""
        record, captured = self._records.get(key), len(self._captured_calls())
        if (record is None or record.graphs is None) and captured >= self._max_graphs:
            return None
        if record is None and len(self._records) >= MOST_SIGNATURES:
            if not captured:
                self._stop([Problem(TOO_MANY)])
            return None
        return self._records.setdefault(key, SignatureRecord(first_batch=self._batch_number()))

    def _batch_number(self) -> int:
        return self._trainer.fit_loop.epoch_loop.total_batch_idx

    def _run_record(self, record: SignatureRecord, inputs: Any) -> Any:
        args, kwargs = inputs
        if record.eager_runs < self._warmup or record.last_epoch != self._trainer.current_epoch:
            return self._run_watched(record, inputs)
        has_gradient = record.watches[-1].given
        if record.graphs is not None and any(has_gradient):
            # Other outputs may get gradients from this epoch on.
            if has_gradient != record.graphs.needs_gradient:
                self._recapture()
                return self._eager_forward(*args, **kwargs)
        if record.graphs is None:
            if has_gradient and not any(has_gradient):
                # The backward of the last run is still to come, or there was none.
                if self._batch_number() - record.first_batch < 5 * self._warmup:
                    return self._run_watched(record, inputs)
                text = (
                    "No backward reaches its outputs. Where nobody needs one, run the module in"
                    " `torch.no_grad()`."
                )
                return self._stop_and_run([Problem(text)], inputs)
            if problems := record.find_problems():
                return self._stop_and_run(problems, inputs)
            record.graphs = self._capture(record.watches[-1], inputs)
            if record.graphs is None:
                return self._stop_and_run(record.watches[-1].problems, inputs)
            if len(self._captured_calls()) == self._max_graphs:
                # No other signature will be captured: free the records of the others.
                self._records = {k: r for k, r in self._records.items() if r.graphs is not None}
        if record.graphs.is_busy:
            # The module runs a second time before a backward.
            return self._eager_forward(*args, **kwargs)
        self.replays += 1
        return record.graphs(inputs, list(self._module.parameters()))

    def _recapture(self) -> None:
        """Drop the graphs, and stop capturing if they went out of date too often."""
        self._drop_graphs()
        if not self._recaptures.add(self.replays):
            times = self._recaptures.in_vain
            text = f"Its graphs went out of date {times} times, each time before they had paid."
            self._stop([Problem(text)])

    def _wait_for_weights(self) -> None:
        for unit in () if self._engine is None else tuple(self._engine.arena.holders):
            unit.wait()

    def _check_engine(self) -> None:
        """Find the module's unit in the engine of `zero3`, which may be a new one.

        Raises:
            ValueError: the module cannot be captured where it runs now.
        """
        engine = getattr(self._strategy, "engine", None)
        # `Zero3Strategy` makes another engine for optimizers with other groups of parameters.
        if engine is not None and engine is not self._engine:
            self._drop_graphs()
            self._engine, self._unit = engine, unit_around(engine, self._module)
        if self._unit is not None and not (self._unit.pins or self._unit.lent):
            raise ValueError("it reads weights that are not gathered while it runs.")
        if in_checkpoint():
            raise ValueError(
                "a checkpoint runs it, and again in the backward. Put the checkpoint inside of the"
                " module."
            )

    def _run_watched(self, record: SignatureRecord, inputs: Any) -> Any:
        watch, snapshot = Watch(self._strategy.root_device, inputs), Snapshot(self._module)
        exchange_log = [] if self._engine is None else self._engine.collectives.exchange_log.trace
        exchanges = len(exchange_log)
        with watch.watching(None, forward=True):
            output = watch.note_output(
                self._eager_forward(*inputs[0], **inputs[1]), self._eager_forward
            )
        watch.add_changes(snapshot.changes())
        if watch.exchanges or len(exchange_log) != exchanges:
            watch.add(
                "It exchanges something with other ranks, which need not capture it at the same"
                " time.",
                watch.exchanges,
            )
        watch.follow_gradients(output)
        record.add_run(watch, self._trainer.current_epoch)
        if record.graphs is not None and (watch.problems or compare(*record.watches)):
            self._recapture()
        return output

    def _capture(self, watch: Watch, inputs: Any) -> CapturedCall | None:
        """Return the captured call, or None if ``watch`` has found problems in the backward."""
        call = CapturedCall(self._name, self._graphs, watch, self._wait_for_weights)
        try:
            call.capture(self._eager_forward, inputs, self._module)
        except CaptureError:
            if not watch.problems:
                raise
        except RuntimeError as error:  # CUDA cannot go on after a capture that failed
            text = (
                f"Capturing module {self._name!r} failed. Leave it out of"
                " `CUDAGraphStep(modules=...)`."
            )
            raise RuntimeError(text) from error
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
        """Add a problem for each weight outside of the module that would get a gradient inside."""
        names = {id(p): name for name, p in self._trainer.lightning_module.named_parameters()}
        own = {memory_of(p) for p in self._module.parameters() if not is_sharded(p)}
        for leaf in call.foreign_leaves:
            name = names.get(id(leaf))
            # Any other leaf was made by the module itself, which drops it.
            if name is not None or memory_of(leaf) in watch.sources - own:
                text = (
                    f"It computes with {name or f'a tensor of shape {list(leaf.shape)}'}, which is"
                    " none of its parameters:"
                )
                remedy = "Pass it to `forward`, or capture a module that has both."
                watch.add(f"{text} its gradient would be lost. {remedy}", watch.program)

    def stop_capturing(self) -> None:
        """Run the module eagerly from now on."""
        self.is_eager = True
        self._drop_graphs()

    def _stop(self, problems: list[Problem]) -> None:
        """Stop capturing on this rank; the others follow before the next micro-batch."""
        self.stop_capturing()
        self.problems = [f"Module {self._name!r}: {problem}" for problem in problems]

    def _stop_and_run(self, problems: list[Problem], inputs: Any) -> Any:
        self._stop(problems)
        return self._eager_forward(*inputs[0], **inputs[1])


class ModulesRunner:
    """Captures single modules during a fit; see :class:`~.step_runner.StepRunner`.

    Args:
        trainer: the trainer of the fit.
        root: the module that it trains.
        graphs: makes the graphs.
        patterns: see :func:`find_modules`.
        warmup: eager runs of a module with inputs of one signature before its capture.
        max_graphs: number of signatures that are captured of each module.
        strict: raise an error where a module cannot be captured, instead of going on eagerly.

    Attributes:
        captured: the modules with replaced ``forward``, by name.
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
        self._warmup, self._max_graphs = warmup, max_graphs
        self._ranks = GraphRanks(trainer, strict)
        self.captured: dict[str, CapturedModule] = {}

    def install(self) -> None:
        """Replace ``forward`` of the modules; collective."""
        self._graphs.enter_stream()
        problems = [*check_device(self._trainer), *check_strategy_of_modules(self._trainer)]
        modules = find_modules(self._root, self._patterns)
        if not self._ranks.have_no_problems(problems):
            self._ranks.report_problems(CapturedModule.kind, problems)
            return
        for name, module in modules.items():
            self.captured[name] = CapturedModule(
                name, module, self._graphs, self._trainer, self._warmup, self._max_graphs
            )

    def agree_on_refusals(self) -> None:
        """Stop capturing on all ranks each module that one rank cannot capture; collective.

        It is called before each micro-batch and after the last. Each rank decides by its own inputs
        which signatures it captures, and when: modules exchange nothing inside, and ranks may run
        them different numbers of times.
        """
        # hazard: all ranks must exchange equally many numbers. A module that is eager without new
        # problems is so on all ranks, so this list is the same everywhere.
        parts = [each for each in self.captured.values() if each.problems or not each.is_eager]
        if parts:
            gathered = self._ranks.gather_numbers([bool(each.problems) for each in parts])
            self._ranks.stop_parts(parts, zip(*gathered, strict=True))

    def uninstall(self) -> None:
        """Free the graphs and restore ``forward`` of the modules."""
        for captured in self.captured.values():
            captured.uninstall()
        self._graphs.renew_pools()
        self._graphs.leave_stream()

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs of all graphs."""
        return sum(captured.input_nbytes for captured in self.captured.values())

    def memory_bytes(self) -> dict[str, int]:
        """See :meth:`CUDAGraphStep.memory_bytes`."""
        return {"pool": self._graphs.pool_nbytes(), "inputs": self.input_nbytes, "gradients": 0}

    def summary(self) -> str:
        """Return one line about the run."""
        counts = ", ".join(
            f"{name} {captured.replays} times" for name, captured in self.captured.items()
        )
        return f"CUDAGraphStep: replayed {counts or 'nothing'}"
