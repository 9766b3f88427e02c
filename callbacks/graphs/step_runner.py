"""`StepRunner` decides whether a micro-batch runs eagerly, is captured, verified or replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import replace
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
from .captured_step import CapturedStep, StaticGradients
from .compare import generators_of
from .device import CudaGraphs, SoftwareGraphs
from .eager_run import EagerRun, KeptRun, loss_of
from .fingerprint import Fingerprint
from .preconditions import check_trainer
from .ranks import GraphRanks
from .records import Captures, Options, Record, Run
from .static_inputs import NotCapturable, signature

_NEVER = 2**31 - 1
_NO_LOSS = (
    "`training_step` returned no loss. Return one that is zero, so that every step is the same."
)


class StepRunner:
    """Replaces `Strategy.training_step`, its `backward` and `Precision.backward` during a fit.

    Args:
        trainer: the trainer of the fit.
        module: the module that it trains.
        graphs: makes the graphs.
        options: how to capture.
        optimizer: capture the optimizers' updates, too.

    Attributes:
        captures: the graphs.
        steps: number of micro-batches so far; those that are not replayed run eagerly.
        verified: number of these that ran eagerly, and were compared with a replay.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        graphs: CudaGraphs | SoftwareGraphs,
        options: Options,
        optimizer: bool,
    ) -> None:
        self._trainer, self._module, self._graphs = trainer, module, graphs
        if isinstance(trainer.strategy, DDPStrategy):
            # `DistributedDataParallel` rebuilds its buckets in its second step; with NCCL, torch's
            # notes on CUDA graphs ask for eleven steps before a capture.
            least = 11 if trainer.strategy.root_device.type == "cuda" else 4
            options = replace(options, warmup=max(options.warmup, least))
        self.captures = Captures[CapturedStep](options)
        self._needs_optimizers, self._optimizers = optimizer, list[CapturedOptimizer]()
        self._gradients = StaticGradients()
        # What the forward leaves for the backward that follows.
        self._run_backward: Callable[[Callable[[], None]], None] | None = None
        self._compare: Callable[[], None] | None = None
        self._is_eager = False  # from now on, because a step cannot be captured
        self._is_replay = False  # whether the current micro-batch is replayed
        self._difference: str | None = None  # between a replay and its eager step
        self._unverified = 0  # micro-batches that were replayed since the last comparison
        self._ranks = GraphRanks(trainer, options.strict)
        self.steps = self.verified = 0
        strategy = trainer.strategy
        self._eager_step, self._strategy_backward = strategy.training_step, strategy.backward
        self._plugin = strategy.precision_plugin
        self._eager_backward = self._plugin.backward

    def install(self) -> None:
        """Replace the methods of the strategy and the plugin; collective."""
        self._graphs.enter_stream()
        vars(self._trainer.strategy)["training_step"] = self._training_step
        vars(self._trainer.strategy)["backward"] = self._backward_and_compare
        vars(self._plugin)["backward"] = self._backward
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
        vars(self._trainer.strategy).pop("training_step", None)
        vars(self._trainer.strategy).pop("backward", None)
        vars(self._plugin).pop("backward", None)
        self._drop_graphs()
        for optimizer in self._optimizers:
            optimizer.uninstall()
        self._optimizers = []
        self._graphs.leave_stream()

    def _drop_graphs(self) -> None:
        """Free all graphs; later steps run eagerly at first and are captured anew."""
        self.captures.drop()
        for optimizer in self._optimizers:
            optimizer.reset()
        self._run_backward = self._compare = None
        self._graphs.renew_pools()

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs of all graphs."""
        return self.captures.input_nbytes

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
            f"CUDAGraphStep: {self.captures.replays} of {self.steps} micro-batches replayed,"
            f" {self.verified} verified, {len(self.captures.graphs())} shapes captured; {memory}"
        )

    # ---- forward -----------------------------------------------------------------------------

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._run_backward = self._compare = None
        self._is_replay = False
        self.steps += 1
        if self._is_eager:
            return self._eager_step(*args, **kwargs)
        batch, *rest = args
        record = self._find_record(batch)
        if record is None:
            return self._eager_step(*args)
        run = record.next_run(self.captures.options, self._trainer.current_epoch)
        if run is Run.WATCH:
            return self._run_watched(record, batch, rest)
        if run is Run.CAPTURE:
            if not self._may_capture(record.problems):
                return self._eager_step(*args)
            self._capture(record, batch, rest)
        assert record.graphs is not None
        if run is not Run.CAPTURE:
            record.graphs.copy_batch(batch)
        if run is Run.VERIFY:
            return self._run_verified(record, batch, rest)
        self._is_replay = True
        self._run_backward = record.graphs.replay_backward
        self.captures.replays += 1
        self._unverified += 1
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # A replay runs no `DistributedDataParallel._post_forward`, which sets this flag.
            model.require_forward_param_sync = model.require_backward_grad_sync
        watch = getattr(self._trainer.strategy, "watch", None)
        with nullcontext() if watch is None else watch.doing(Activity.FORWARD):
            return record.graphs.replay_forward()

    def _find_record(self, batch: Any) -> Record[CapturedStep] | None:
        """Return the record of a micro-batch; None if it runs eagerly.

        All ranks know the signatures of all, so they take the same decisions. On all ranks this
        method also does what one of them needs: stop capturing, drop graphs that are out of date,
        or run an optimizer's update eagerly.
        """
        problems = [] if self._difference is None else [self._difference]
        try:
            digest = hash(self._key(batch)) >> 1  # an int64 above the least
        except NotCapturable as error:
            digest, problems = 0, [str(error)]
        changes = self.captures.changes()
        own = [digest, bool(problems), bool(changes), *(bool(o.problems) for o in self._optimizers)]
        digests, has_problems, is_stale, *flags = zip(*self._ranks.gather_numbers(own), strict=True)
        self._ranks.stop_parts(self._optimizers, flags)
        if any(has_problems):
            self._stop_capturing(problems)
        elif any(is_stale):
            self._recapture(changes, is_stale.index(True))
        if self._is_eager:
            return None
        try:
            return self.captures.find_record(digests, self.steps)
        except NotCapturable as error:
            self._stop_capturing([str(error)])
            return None

    def _key(self, batch: Any) -> Hashable:
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # `DistributedDataParallel` reduces gradients in the last micro-batch of a step only,
            # and broadcasts buffers in the micro-batch that follows it.
            flags = model.require_backward_grad_sync, model.require_forward_param_sync
            return signature(batch), flags
        return signature(batch)

    def agree_on_refusals(self) -> None:
        """Report a difference that the last micro-batch showed; collective, when training ends."""
        if not self._is_eager:
            self._may_capture([] if self._difference is None else [self._difference])

    def _recapture(self, reasons: list[str], rank: int) -> None:
        """Drop all graphs; ``rank`` is the first whose graphs are out of date."""
        reason = f"{reasons[0] if reasons else f'something on rank {rank}'} changed"
        may_pay = self.captures.drop_stale()
        self._drop_graphs()
        if may_pay:
            rank_zero_info(f"CUDAGraphStep: {reason}; the training step is captured again")
        else:
            text = (
                f"Captured steps went out of date {self.captures.in_vain} times, each time before"
                f" they had paid; the last time, {reason}. Keep a number that changes in a buffer"
                " of the module and fill it in `on_train_batch_start`: `self.weight.fill_(...)`."
            )
            self._stop_capturing([text] if reasons else [])

    def _may_capture(self, problems: list[str]) -> bool:
        """Return whether no rank has ``problems``; otherwise stop capturing on all ranks."""
        if not self._ranks.have_no_problems(problems):
            self._stop_capturing(problems)
        return not self._is_eager

    def _stop_capturing(self, problems: list[str]) -> None:
        """Report and run eagerly from now on; collective, one rank at least has ``problems``."""
        self._is_eager = True
        self._drop_graphs()
        engine = getattr(self._trainer.strategy, "engine", None)
        if engine is not None:
            engine.expect_graphs(False)
        self._ranks.report_problems("the training step", problems)

    def _run_watched(self, record: Record[CapturedStep], batch: Any, rest: list) -> Any:
        """Run eagerly and note all that a replay could not repeat."""
        eager = EagerRun(self._graphs, self._module, self._module)
        output = eager.forward(self._eager_step, batch, *rest)
        if not isinstance(loss_of(output), Tensor):
            eager.add(_NO_LOSS)
        record.add_run(eager)
        self._run_backward = eager.backward
        return output

    def _capture(self, record: Record[CapturedStep], batch: Any, rest: list) -> None:
        engine = getattr(self._trainer.strategy, "engine", None)
        bookkeeping = self._gradients if engine is None else ReplayedStep(engine)
        device = self._trainer.strategy.root_device
        generators = generators_of(self._module, device)
        pair = self._graphs.make_pair(generators, record.offsets)
        graphs = CapturedStep(pair, bookkeeping, self._module, device)
        # The capture is this micro-batch's run in Python, so that what the program counts in Python
        # is what it counts in an eager run.
        graphs.capture_forward(batch, tuple(rest), self._eager_step)
        fingerprint = Fingerprint(self._trainer, self._module, "training_step")
        self.captures.add(record, graphs, fingerprint)

    def _run_verified(self, record: Record[CapturedStep], batch: Any, rest: list) -> Any:
        """Run eagerly, and compare a replay when the backward is over."""
        engine = getattr(self._trainer.strategy, "engine", None)
        eager = KeptRun(self._graphs, self._module, engine)
        is_first = not record.verified
        record.verified += 1
        self.verified += 1
        self._run_backward = eager.backward
        self._compare = partial(self._compare_with_replay, record, eager, is_first)
        output = eager.forward(self._eager_step, batch, *rest)
        if not isinstance(loss_of(output), Tensor):  # and no backward comes
            self._difference = _NO_LOSS
        return output

    # ---- backward ----------------------------------------------------------------------------

    def _backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        run = partial(self._eager_backward, tensor, *args, **kwargs)
        run_backward, self._run_backward = self._run_backward, None
        if run_backward is None:
            run()
        else:
            run_backward(run)

    def _backward_and_compare(self, *args: Any, **kwargs: Any) -> Tensor:
        compare, self._compare = self._compare, None
        loss = self._strategy_backward(*args, **kwargs)
        if compare is not None:
            compare()
        return loss

    def _compare_with_replay(
        self, record: Record[CapturedStep], eager: KeptRun, is_first: bool
    ) -> None:
        assert record.graphs is not None
        engine = getattr(self._trainer.strategy, "engine", None)
        # hazard: all ranks replay, whatever this one has found, as replays exchange something.
        difference = record.graphs.compare(eager, is_first, engine)
        if difference is not None or eager.problems:
            found = eager.problems[0] if eager.problems else difference
            self._difference = (
                f"An eager step and its replay are not the same: {found}\n    Since the last"
                f" comparison {self._unverified} micro-batches were replayed."
            )
        self._unverified = 0
