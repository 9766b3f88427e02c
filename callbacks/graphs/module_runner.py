"""`ModulesRunner` captures single modules, for models whose step cannot be captured as a whole."""

from __future__ import annotations

from collections.abc import Hashable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from ...strategies.engine import ShardedParameter, Zero3Engine, unit_around
from .captured_module import CapturedCall, ModuleRun
from .device import CudaGraphs, SoftwareGraphs
from .eager_run import EagerRun
from .fingerprint import Fingerprint
from .preconditions import check_device, check_strategy_of_modules
from .ranks import GraphRanks
from .records import Captures, Options, Record, Run
from .static_inputs import NotCapturable, signature


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


def _count_exchanges() -> int:
    """Return how often the ranks have exchanged something."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return 0 if group is None else group._get_sequence_number_for_group()  # type: ignore[attr-defined]


class CapturedModule:
    """Replaces the ``forward`` of a module during a fit.

    Args:
        name: the module's name.
        module: the module to be captured.
        graphs: makes the graphs.
        trainer: the trainer of the fit.
        options: how to capture.

    Attributes:
        problems: see :class:`~.ranks.Part`.
        is_eager: whether this rank runs the module eagerly from now on.
        captures: the graphs.
    """

    kind = "a module"

    def __init__(
        self,
        name: str,
        module: nn.Module,
        graphs: CudaGraphs | SoftwareGraphs,
        trainer: Trainer,
        options: Options,
    ) -> None:
        self._name, self._module, self._graphs = name, module, graphs
        self._trainer = trainer
        self._device = trainer.strategy.root_device
        self._eager_forward, self._own_forward = module.forward, vars(module).get("forward")
        self.captures = Captures[CapturedCall](options)
        self._engine: Zero3Engine | None = None
        self._needs_unit = False  # its weights are sharded, and unsharded while it runs
        self.problems, self.is_eager = list[str](), False
        vars(module)["forward"] = self._run

    def uninstall(self) -> None:
        """Restore the module's ``forward`` and free the graphs."""
        del vars(self._module)["forward"]
        if self._own_forward is not None:
            vars(self._module)["forward"] = self._own_forward
        self.captures.drop()

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_eager or not torch.is_grad_enabled():
            return self._eager_forward(*args, **kwargs)
        inputs, device = (args, kwargs), self._device.type
        try:
            self._check_place()
            autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            record = self._find_record((signature(inputs, "inputs"), autocast))
            if record is not None:
                return self._run_record(record, inputs)
        except NotCapturable as error:
            self._stop(str(error))
        return self._eager_forward(*args, **kwargs)

    def _find_record(self, key: Hashable) -> Record[CapturedCall] | None:
        """Return the record of inputs with this signature; None if they run eagerly."""
        graphs = self.captures.graphs()
        if graphs and self._needs_unit and not graphs[0].finds_weights:
            return None  # they lie elsewhere for once, as inside of `gathered`
        if self.captures.changes() and not self.captures.drop_stale():
            times = self.captures.in_vain
            raise NotCapturable(
                f"Its graphs went out of date {times} times, each time before they had paid."
            )
        record = self.captures.find_record(key, self._batch_number())
        # Busy: the module runs a second time before a backward.
        is_busy = record is not None and record.graphs is not None and record.graphs.is_busy
        return None if is_busy else record

    def _batch_number(self) -> int:
        return self._trainer.fit_loop.epoch_loop.total_batch_idx

    def _run_record(self, record: Record[CapturedCall], inputs: Any) -> Any:
        """Run the module in one of all ways.

        Raises:
            NotCapturable: it cannot be captured.
        """
        next_run = record.next_run(self.captures.options, self._trainer.current_epoch)
        if record.graphs is None:
            record.note_given()
            if record.problems:
                raise NotCapturable(record.problems[0])
            if not record.eager_runs:
                return self._run_first(record, *inputs)
        if next_run is Run.CAPTURE and record.given and not any(record.given):
            # The backward of the last run is still to come, or there was none.
            if self._batch_number() - record.first_batch >= 5 * self.captures.options.warmup:
                raise NotCapturable(
                    "No backward reaches its outputs. Where nobody needs one, run the module in"
                    " `torch.no_grad()`."
                )
            next_run = Run.WATCH
        if next_run is Run.CAPTURE:
            self._capture(record, inputs)
        eager = None
        if next_run in (Run.WATCH, Run.VERIFY):
            eager = EagerRun(self._graphs, self._trainer.lightning_module, self._module)
        record.verified += next_run is Run.VERIFY
        self.captures.replays += eager is None
        parts = self._module, self._device, record.graphs, eager
        run = ModuleRun(*parts, self._eager_forward, self._tell)
        output = run(inputs)
        if eager is not None and next_run is Run.WATCH:
            record.add_run(eager)
            record.last_given = run.given
            self._note_leaves(eager, run.foreign_leaves)
        return output

    def _run_first(self, record: Record[CapturedCall], args: Any, kwargs: Any) -> Any:
        """Run the module without a node around it, which in-place changes of inputs do not bear."""
        eager = EagerRun(self._graphs, self._trainer.lightning_module, self._module)
        exchanges = _count_exchanges()
        output = eager.forward(self._eager_forward, *args, **kwargs)
        if _count_exchanges() != exchanges:
            eager.add(
                "It exchanges something with other ranks, which need not capture it at the same"
                " time."
            )
        if eager.tape.calls:
            eager.add("It logs, which a graph of a module cannot repeat. Log in `training_step`.")
        record.add_run(eager)
        return output

    def _note_leaves(self, eager: EagerRun, leaves: list[Tensor]) -> None:
        """Note gradients that a graph of the module would lose or count twice."""
        own = set(map(id, self._module.parameters()))
        for name, parameter in self._trainer.lightning_module.named_parameters():
            if any(parameter is leaf for leaf in leaves) and id(parameter) not in own:
                eager.add(
                    f"It computes with {name}, which is none of its parameters: its gradient would"
                    " be lost. Pass it to `forward`, or capture a module that has both."
                )
            if id(parameter) in own and parameter._backward_hooks:
                eager.add(f"Parameter {name} has a hook, which would run twice.")

    def _capture(self, record: Record[CapturedCall], inputs: Any) -> None:
        call = CapturedCall(
            self._name,
            self._module,
            self._graphs,
            self._device,
            record.offsets,
            record.given,
            self._wait_for_weights,
        )
        try:
            call.capture(self._eager_forward, inputs)
        except RuntimeError as error:  # CUDA cannot go on after a capture that failed
            text = f"Capturing module {self._name!r} failed. Leave it out of"
            raise RuntimeError(f"{text} `CUDAGraphStep(modules=...)`.") from error
        self.captures.add(record, call, Fingerprint(self._trainer, self._module, "forward"))

    def _wait_for_weights(self) -> None:
        for unit in () if self._engine is None else self._engine.units:
            unit.wait()

    def _check_place(self) -> None:
        """Find out whether the module may run as a graph where it runs now.

        Raises:
            NotCapturable: it may not.
        """
        engine = getattr(self._trainer.strategy, "engine", None)
        # `Zero3Strategy` makes another engine for optimizers with other groups of parameters.
        if engine is not None and engine is not self._engine:
            self.captures.drop()
            self._engine = engine
            try:
                self._needs_unit = unit_around(engine, self._module) is not None
            except ValueError as error:
                raise NotCapturable(str(error)) from error
        parameters = self._module.parameters()
        if self._needs_unit and any(isinstance(p, ShardedParameter) for p in parameters):
            raise NotCapturable("it reads weights that are not gathered while it runs.")
        if in_checkpoint():
            raise NotCapturable(
                "a checkpoint runs it, and again in the backward. Put the checkpoint inside of the"
                " module."
            )

    def _tell(self, difference: str) -> None:
        """Stop capturing, as a replay differed from its eager run."""
        self._stop(f"An eager run and its replay are not the same: {difference}")

    def stop_capturing(self) -> None:
        """Run the module eagerly from now on."""
        self.is_eager = True
        self.captures.drop()

    def _stop(self, problem: str) -> None:
        """Stop capturing on this rank; the others follow before the next micro-batch."""
        self.stop_capturing()
        self.problems = [f"Module {self._name!r}: {problem}"]


class ModulesRunner:
    """Captures single modules during a fit; see :class:`~.step_runner.StepRunner`.

    Args:
        trainer: the trainer of the fit.
        root: the module that it trains.
        graphs: makes the graphs.
        options: how to capture.
        patterns: see :func:`find_modules`.

    Attributes:
        captured: the modules with replaced ``forward``, by name.
    """

    def __init__(
        self,
        trainer: Trainer,
        root: LightningModule,
        graphs: CudaGraphs | SoftwareGraphs,
        options: Options,
        patterns: list[str],
    ) -> None:
        self._trainer, self._root, self._graphs, self._patterns = trainer, root, graphs, patterns
        self._options, self._ranks = options, GraphRanks(trainer, options.strict)
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
                name, module, self._graphs, self._trainer, self._options
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
        return sum(each.captures.input_nbytes for each in self.captured.values())

    def memory_bytes(self) -> dict[str, int]:
        """See :meth:`CUDAGraphStep.memory_bytes`."""
        return {"pool": self._graphs.pool_nbytes(), "inputs": self.input_nbytes, "gradients": 0}

    def summary(self) -> str:
        """Return one line about the run."""
        counts = ", ".join(
            f"{name} {captured.captures.replays} times" for name, captured in self.captured.items()
        )
        return f"CUDAGraphStep: replayed {counts or 'nothing'}"
