"""`StepRunner` decides whether a micro-batch runs eagerly, is captured or is replayed."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...strategies.engine import ReplayedStep
from ...strategies.liveness import Activity
from .captured_optimizer import CapturedOptimizer, check_optimizer
from .captured_step import CapturedStep, StaticGradients, loss_of
from .compare import SignatureRecord, compare
from .device import CudaGraphs, SoftwareGraphs
from .limits import MOST_SIGNATURES, TOO_MANY, Recaptures
from .module_state import GroupSettings, Guard, Snapshot
from .preconditions import check_trainer
from .python_effects import WatchedIndex
from .ranks import GraphRanks
from .static_inputs import UnsupportedBatch, signature, tensors_in
from .watch import Problem, Watch

_UNKNOWN = -1  # the number of a signature that came after `MOST_SIGNATURES` others
_NEVER = 2**31 - 1


class StepRunner:
    """Replaces `Strategy.training_step` and `Precision.backward` during a fit.

    Args:
        trainer: the trainer of the fit.
        module: the module that it trains.
        graphs: makes the graphs.
        warmup: eager steps with batches of one signature before its capture; the last two are
            compared.
        max_graphs: number of signatures that are captured; others run eagerly.
        strict: raise an error where a step cannot be captured, instead of going on eagerly.
        optimizer: capture the optimizers' updates, too.

    Attributes:
        steps: number of micro-batches so far.
        replays: number of these that were replayed.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        graphs: CudaGraphs | SoftwareGraphs,
        warmup: int,
        max_graphs: int,
        strict: bool,
        optimizer: bool,
    ) -> None:
        self._trainer, self._module, self._graphs = trainer, module, graphs
        if isinstance(trainer.strategy, DDPStrategy):
            # `DistributedDataParallel` rebuilds its buckets in its second step; with NCCL, torch's
            # notes on CUDA graphs ask for eleven steps before a capture.
            warmup = max(warmup, 11 if trainer.strategy.root_device.type == "cuda" else 4)
        self._warmup, self._max_graphs = warmup, max_graphs
        self._needs_optimizers, self._optimizers = optimizer, list[CapturedOptimizer]()
        self._gradients = StaticGradients()
        self._records: dict[Hashable, SignatureRecord] = {}
        self._guard: Guard | None = None
        # Set by a forward, for the backward that follows: the graphs of a replayed micro-batch, or
        # the record of a watched one.
        self._replayed_step: CapturedStep | None = None
        self._watched_record: SignatureRecord | None = None
        self._watched_inputs: list[Tensor] = []
        self._signature_numbers: dict[Hashable, int] = {}  # in the order of their first batches
        self._is_eager = False  # from now on, because a step cannot be captured
        self._is_replay = False  # whether the current micro-batch is replayed
        self._stale_reason: str | None = None  # why all graphs are out of date
        self._ranks = GraphRanks(trainer, strict)
        self._recaptures = Recaptures(warmup)
        self.steps = self.replays = 0
        self._eager_step = trainer.strategy.training_step
        self._plugin = trainer.strategy.precision_plugin
        self._eager_backward = self._plugin.backward

    def install(self) -> None:
        """Replace the methods of the strategy and the plugin; collective."""
        self._graphs.enter_stream()
        self._trainer.strategy.training_step = self._training_step
        self._plugin.backward = self._backward
        if not self._may_capture(check_trainer(self._trainer, self._module)):
            return
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # hazard: `DistributedDataParallel` records events in each hundredth forward, and waits
            # for them in the next one: a capture may contain neither.
            model._set_ddp_runtime_logging_sample_rate(_NEVER)
        if self._needs_optimizers:
            self._wrap_optimizers()

    def _wrap_optimizers(self) -> None:
        device = self._trainer.strategy.root_device
        checks = {
            optimizer: partial(check_optimizer, optimizer, device)
            for optimizer in self._trainer.optimizers
        }
        problems = [problem for check in checks.values() for problem in check()]
        if not self._ranks.have_no_problems(problems):
            self._ranks.report_problems(CapturedOptimizer.kind, problems)
            return
        for optimizer, check in checks.items():
            self._optimizers.append(
                CapturedOptimizer(
                    optimizer, self._graphs.make_graph, lambda: self._is_replay, check
                )
            )

    def uninstall(self) -> None:
        """Free the graphs and restore the methods of strategy, plugin and optimizers."""
        self._trainer.strategy.__dict__.pop("training_step", None)
        self._plugin.__dict__.pop("backward", None)
        self._drop_graphs()
        for optimizer in self._optimizers:
            optimizer.uninstall()
        self._optimizers = []
        self._graphs.leave_stream()

    def _drop_graphs(self) -> None:
        """Free all graphs; later steps run eagerly at first and are captured anew."""
        for step in self._captured_steps():
            step.reset()
        for optimizer in self._optimizers:
            optimizer.reset()
        self._records, self._signature_numbers = {}, {}
        self._guard = self._replayed_step = None
        self._graphs.renew_pools()

    def _captured_steps(self) -> list[CapturedStep]:
        return [record.graphs for record in self._records.values() if record.graphs is not None]

    @property
    def recaptures(self) -> int:
        """How often all graphs went out of date."""
        return self._recaptures.count

    @property
    def captured(self) -> int:
        """Number of signatures that have graphs."""
        return len(self._captured_steps())

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs of all graphs."""
        return sum(step.input_nbytes for step in self._captured_steps())

    def memory_bytes(self) -> dict[str, int]:
        """See :meth:`CUDAGraphStep.memory_bytes`."""
        return {
            "pool": self._graphs.pool_nbytes(),
            "inputs": self.input_nbytes,
            "gradients": self._gradients.nbytes,
        }

    def summary(self) -> str:
        """Return one line about the run."""
        memory = ", ".join(
            f"{name} {size / 2**20:.1f} MiB" for name, size in self.memory_bytes().items()
        )
        return (
            f"CUDAGraphStep: {self.replays} of {self.steps} micro-batches replayed, {self.captured}"
            f" shapes captured; {memory}"
        )

    # ---- forward -----------------------------------------------------------------------------

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._replayed_step = self._watched_record = None
        self._is_replay = False
        self.steps += 1
        if self._is_eager:
            return self._eager_step(*args, **kwargs)
        batch, *rest = args
        try:
            key: Hashable = self._key(batch)
        except UnsupportedBatch as error:
            key = Problem(str(error))
        numbers = self._agree_on_numbers(key)
        record = None if self._is_eager else self._find_record(numbers)
        if record is None:
            return self._eager_step(*args)
        engine = getattr(self._trainer.strategy, "engine", None)
        if engine is not None:
            engine.expect_graphs()
        if record.eager_runs < self._warmup or record.last_epoch != self._trainer.current_epoch:
            return self._run_watched(record, batch, rest)
        if record.graphs is None:
            if not self._may_capture(record.find_problems()):
                return self._eager_step(*args)
            record.graphs = self._capture(record, batch, rest)
            if self.captured == self._max_graphs:
                # No other signature will be captured: free the records of the others.
                self._records = {k: r for k, r in self._records.items() if r.graphs is not None}
        else:
            record.graphs.copy_batch(batch)
        self._replayed_step = record.graphs
        self._is_replay = True
        self.replays += 1
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # A replay runs no `DistributedDataParallel._post_forward`, which sets this flag.
            model.require_forward_param_sync = model.require_backward_grad_sync
        watch = getattr(self._trainer.strategy, "watch", None)
        with nullcontext() if watch is None else watch.doing(Activity.FORWARD):
            return record.graphs.replay_forward(self._module)

    def _find_record(self, numbers: tuple[int, ...]) -> SignatureRecord | None:
        """Return the record of micro-batches with these ``numbers``; None if they run eagerly."""
        record = self._records.get(numbers)
        if (record is None or record.graphs is None) and self.captured >= self._max_graphs:
            return None
        if record is None and len(self._records) >= MOST_SIGNATURES and not self.captured:
            self._stop_capturing([Problem(TOO_MANY)])
        if record is None and (
            _UNKNOWN in numbers or len(self._records) >= MOST_SIGNATURES or self._is_eager
        ):
            return None
        return self._records.setdefault(numbers, SignatureRecord())

    def _key(self, batch: Any) -> Hashable:
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # `DistributedDataParallel` reduces gradients in the last micro-batch of a step only,
            # and broadcasts buffers in the micro-batch that follows it.
            return (
                signature(batch),
                model.require_backward_grad_sync,
                model.require_forward_param_sync,
            )
        return signature(batch)

    def _agree_on_numbers(self, key: Hashable) -> tuple[int, ...]:
        """Return the signature number of this micro-batch on each rank, in rank order.

        All ranks return the same numbers, so they take the same decisions in all that follows. On
        all ranks this method also does what one of them needs: stop capturing (``key`` is a
        `Problem`), drop graphs that are out of date, or run an optimizer's update eagerly.
        """
        if self._stale_reason is None and self._guard is not None:
            self._stale_reason = self._guard.changed()
        problems = [key] if isinstance(key, Problem) else []
        own = [self._number_of(key), bool(problems), self._stale_reason is not None]
        own += [bool(optimizer.problems) for optimizer in self._optimizers]
        gathered = self._ranks.gather_numbers(own)
        numbers, has_problems, is_stale, *optimizer_flags = zip(*gathered, strict=True)
        self._ranks.stop_parts(self._optimizers, optimizer_flags)
        if any(has_problems):
            self._stop_capturing(problems)
        elif any(is_stale):
            self._recapture(is_stale.index(True))
            # Numbers start anew on all ranks, and this micro-batch has the first one.
            numbers = (self._number_of(key),) * len(numbers)
        return numbers

    def _number_of(self, key: Hashable) -> int:
        if key not in self._signature_numbers and len(self._signature_numbers) < MOST_SIGNATURES:
            self._signature_numbers[key] = len(self._signature_numbers)
        return self._signature_numbers.get(key, _UNKNOWN)

    def _recapture(self, rank: int) -> None:
        """Drop all graphs; ``rank`` is the first whose graphs are out of date."""
        own_reason, self._stale_reason = self._stale_reason, None
        reason = own_reason or f"on rank {rank} something changed"
        self._drop_graphs()
        if self._recaptures.add(self.replays):
            rank_zero_info(f"CUDAGraphStep: {reason}; the training step is captured again")
        else:
            times = self._recaptures.in_vain
            text = (
                f"Captured steps went out of date {times} times, each time before they had paid;"
                f" the last time, {reason}."
            )
            self._stop_capturing([Problem(text)] if own_reason else [])

    def _run_watched(self, record: SignatureRecord, batch: Any, rest: list) -> Any:
        """Run the forward eagerly and note all that a replay could not repeat."""
        watch = Watch(self._trainer.strategy.root_device, batch)
        rest = [WatchedIndex(value, watch.add) if type(value) is int else value for value in rest]
        snapshot = Snapshot(self._module)
        with watch.watching(self._module, forward=True):
            output = self._eager_step(batch, *rest)
        output = watch.note_output(output, self._module.training_step)
        watch.add_changes(snapshot.changes())
        if not isinstance(loss_of(output), Tensor):
            text = (
                "`training_step` returned no loss. Return one that is zero, so that every step is"
                " the same."
            )
            watch.add(text, watch.program)
        record.add_run(watch, self._trainer.current_epoch)
        self._watched_record, self._watched_inputs = record, tensors_in(batch)
        return output

    def _may_capture(self, problems: list[Problem]) -> bool:
        """Return whether no rank has ``problems``; otherwise stop capturing on all ranks."""
        if not self._ranks.have_no_problems(problems):
            self._stop_capturing(problems)
        return not self._is_eager

    def _capture(self, record: SignatureRecord, batch: Any, rest: list) -> CapturedStep:
        watch = record.watches[-1]
        engine = getattr(self._trainer.strategy, "engine", None)
        bookkeeping = self._gradients if engine is None else ReplayedStep(engine)
        pair = self._graphs.make_pair(watch.generators, watch.random.offsets)
        step = CapturedStep(pair, bookkeeping)
        step.capture_forward(batch, tuple(rest), self._eager_step, self._module)
        if self._guard is None:
            self._names, self._globals = set(), {}
        self._names |= watch.names
        self._globals |= watch.globals
        for optimizer in self._trainer.optimizers:
            groups = GroupSettings(optimizer)
            self._globals |= {
                (id(optimizer), name): (groups, name)
                for name in watch.settings_of_groups(optimizer)
            }
        self._guard = Guard(
            self._module, self._trainer.optimizers, self._names, self._globals.values()
        )
        return step

    def _stop_capturing(self, problems: list[Problem]) -> None:
        """Report and run eagerly from now on; collective, one rank at least has ``problems``."""
        self._ranks.report_problems("the training step", problems)
        self._drop_graphs()
        self._is_eager = True
        engine = getattr(self._trainer.strategy, "engine", None)
        if engine is not None:
            engine.expect_graphs(False)

    # ---- backward ----------------------------------------------------------------------------

    def _backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        run = partial(self._eager_backward, tensor, *args, **kwargs)
        step, self._replayed_step = self._replayed_step, None
        record, self._watched_record = self._watched_record, None
        if step is not None:
            step.replay_backward(run)
        elif record is not None:
            watch, inputs, self._watched_inputs = record.watches[-1], self._watched_inputs, []
            with watch.watching(self._module, forward=False):
                run()
            if any(tensor.grad is not None for tensor in inputs):
                text = (
                    "A tensor of the batch gets a gradient, which a replay would leave with its"
                    " copy of the batch."
                )
                watch.add(text, watch.program)
            if record.graphs is not None:
                problems = watch.problems or compare(*record.watches)
                if problems:
                    self._stale_reason = problems[0].what
        else:
            run()
