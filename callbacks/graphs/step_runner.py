"""Decides for each micro-batch whether it runs eagerly, is captured or replayed."""

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
from .compare import Shape, compare
from .device import CudaGraphs, SoftwareGraphs
from .limits import MOST_SIGNATURES, TOO_MANY, Recaptures
from .module_state import GroupSettings, Guard, Snapshot
from .preconditions import check_trainer
from .python_effects import WatchedIndex
from .ranks import GraphRanks
from .static_inputs import UnsupportedBatch, signature, tensors_in
from .watch import Problem, Watch

_UNKNOWN = -1
_NEVER = 2**31 - 1


class StepRunner:
    """Stands in for the strategy's ``training_step`` and its precision plugin's ``backward`` during
    a fit.

    Args:
        trainer: that trains.
        module: that is trained.
        graphs: makes them.
        warmup: eager steps with batches of one signature before its capture; two at least are
            compared.
        max_graphs: signatures that are captured; others run eagerly.
        strict: raise where a step cannot be captured, instead of going on eagerly.
        optimizer: capture the optimizers' updates, too.
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
            # DDP rebuilds its buckets in its second step; with NCCL torch's notes on CUDA graphs
            # ask for eleven steps.
            warmup = max(warmup, 11 if trainer.strategy.root_device.type == "cuda" else 4)
        self._warmup, self._max_graphs = warmup, max_graphs
        self._with_optimizers, self._optimizers = optimizer, list[CapturedOptimizer]()
        self._gradients = StaticGradients()
        self._shapes: dict[Hashable, Shape] = {}
        self._guard: Guard | None = None
        self._current: CapturedStep | None = None
        self._watching: Shape | None = None
        self._watched_inputs: list[Tensor] = []
        self._numbers: dict[Hashable, int] = {}  # of signatures, as they came
        self._refused = self._replayed = False
        self._stale: str | None = None  # why all graphs are out of date
        self._ranks = GraphRanks(trainer, strict)
        self._outdated = Recaptures(warmup)
        self.steps = self.replays = 0
        self._eager_step = trainer.strategy.training_step
        self._plugin = trainer.strategy.precision_plugin
        self._eager_backward = self._plugin.backward

    def install(self) -> None:
        """From now on steps go through this object."""
        self._graphs.enter()
        self._trainer.strategy.training_step = self._training_step
        self._plugin.backward = self._backward
        if not self._may_go_on(check_trainer(self._trainer, self._module)):
            return
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # Each hundredth forward it records events, and waits for them in the next one: a
            # capture may be neither.
            model._set_ddp_runtime_logging_sample_rate(_NEVER)
        if self._with_optimizers:
            self._take_optimizers()

    def _take_optimizers(self) -> None:
        device = self._trainer.strategy.root_device
        checks = {
            optimizer: partial(check_optimizer, optimizer, device)
            for optimizer in self._trainer.optimizers
        }
        problems = [problem for check in checks.values() for problem in check()]
        if not self._ranks.have_none(problems):
            self._ranks.report(CapturedOptimizer.kind, problems)
            return
        for optimizer, check in checks.items():
            self._optimizers.append(
                CapturedOptimizer(optimizer, self._graphs.make, lambda: self._replayed, check)
            )

    def remove(self) -> None:
        """The graphs go, and everything is as it was."""
        self._trainer.strategy.__dict__.pop("training_step", None)
        self._plugin.__dict__.pop("backward", None)
        self.drop()
        for optimizer in self._optimizers:
            optimizer.remove()
        self._optimizers = []
        self._graphs.leave()

    def drop(self) -> None:
        """Free all graphs; what runs next runs eagerly and is captured anew."""
        for step in self._steps():
            step.reset()
        for optimizer in self._optimizers:
            optimizer.reset()
        self._shapes, self._numbers = {}, {}
        self._guard = self._current = None
        self._graphs.renew()

    def _steps(self) -> list[CapturedStep]:
        return [shape.graphs for shape in self._shapes.values() if shape.graphs is not None]

    @property
    def recaptures(self) -> int:
        """How often all graphs went out of date."""
        return self._outdated.count

    @property
    def captured(self) -> int:
        """Number of signatures that have graphs."""
        return len(self._steps())

    @property
    def input_nbytes(self) -> int:
        """Memory of the inputs."""
        return sum(step.input_nbytes for step in self._steps())

    def memory_bytes(self) -> dict[str, int]:
        """See :meth:`CUDAGraphStep.memory_bytes`."""
        return {
            "pool": self._graphs.pool_nbytes(),
            "inputs": self.input_nbytes,
            "gradients": self._gradients.nbytes,
        }

    def summary(self) -> str:
        """One line on the run."""
        memory = ", ".join(
            f"{name} {size / 2**20:.1f} MiB" for name, size in self.memory_bytes().items()
        )
        return (
            f"CUDAGraphStep: {self.replays} of {self.steps} micro-batches replayed, {self.captured}"
            f" shapes captured; {memory}"
        )

    # ---- forward -----------------------------------------------------------------------------

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._current = self._watching = None
        self._replayed = False
        self.steps += 1
        if self._refused:
            return self._eager_step(*args, **kwargs)
        batch, *rest = args
        try:
            key: Hashable = self._key(batch)
        except UnsupportedBatch as error:
            key = Problem(str(error))
        key = self._agree(key)
        shape = None if self._refused else self._shape(key)
        if shape is None:
            return self._eager_step(*args)
        if shape.watched < self._warmup or shape.epoch != self._trainer.current_epoch:
            return self._watch(shape, batch, rest)
        if shape.graphs is None and not self._may_go_on(shape.problems()):
            return self._eager_step(*args)
        if shape.graphs is None:
            shape.graphs = self._capture(shape, batch, rest)
            if self.captured == self._max_graphs:  # what is known of others is of no use
                self._shapes = {
                    key: each for key, each in self._shapes.items() if each.graphs is not None
                }
        else:
            shape.graphs.fill(batch)
        self._current = shape.graphs
        self._replayed = True
        self.replays += 1
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # as its forward does
            model.require_forward_param_sync = model.require_backward_grad_sync
        watch = getattr(self._trainer.strategy, "watch", None)
        with nullcontext() if watch is None else watch.doing(Activity.FORWARD):
            return shape.graphs.replay_forward(self._module)

    def _shape(self, key: tuple[int, ...]) -> Shape | None:
        """What is known of micro-batches of this kind; None if they run eagerly."""
        shape = self._shapes.get(key)
        if (shape is None or shape.graphs is None) and self.captured >= self._max_graphs:
            return None
        if shape is None and len(self._shapes) >= MOST_SIGNATURES and not self.captured:
            self._refuse([Problem(TOO_MANY)])
        if shape is None and (
            _UNKNOWN in key or len(self._shapes) >= MOST_SIGNATURES or self._refused
        ):
            return None
        return self._shapes.setdefault(key, Shape())

    def _key(self, batch: Any) -> Hashable:
        model = self._trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            # Gradients are reduced in the last micro-batch of a step only, and buffers broadcast in
            # the one that follows it.
            return (
                signature(batch),
                model.require_backward_grad_sync,
                model.require_forward_param_sync,
            )
        return signature(batch)

    def _agree(self, key: Hashable) -> tuple[int, ...]:
        """The keys of this micro-batch on all ranks, which so take the same decisions in all that
        follows.
        """
        if self._stale is None and self._guard is not None:
            self._stale = self._guard.changed()
        problems, updates = (
            [key] if isinstance(key, Problem) else [],
            [bool(each.problems) for each in self._optimizers],
        )
        mine = [self._number_of(key), bool(problems), self._stale is not None, *updates]
        numbers, refusing, outdated, *refused = zip(*self._ranks.gather(mine), strict=True)
        self._ranks.refuse(self._optimizers, refused)
        if any(refusing):
            self._refuse(problems)
        elif any(outdated):
            self._recapture(outdated.index(True))
            # the first that is counted anew, on all ranks
            numbers = (self._number_of(key),) * len(numbers)
        return numbers

    def _number_of(self, key: Hashable) -> int:
        if key not in self._numbers and len(self._numbers) < MOST_SIGNATURES:
            self._numbers[key] = len(self._numbers)
        return self._numbers.get(key, _UNKNOWN)

    def _recapture(self, rank: int) -> None:
        """``rank`` is the first whose graphs are out of date."""
        known, self._stale = self._stale, None
        reason = known or f"on rank {rank} something changed"
        self.drop()
        if self._outdated.add(self.replays):
            rank_zero_info(f"CUDAGraphStep: {reason}; the training step is captured again")
        else:
            times = self._outdated.in_vain
            what = (
                f"Captured steps went out of date {times} times, each time before they had paid;"
                f" the last time, {reason}."
            )
            self._refuse([Problem(what)] if known else [])

    def _watch(self, shape: Shape, batch: Any, rest: list) -> Any:
        """An eager step, observed."""
        watch = Watch(self._trainer.strategy.root_device, batch)
        rest = [WatchedIndex(value, watch.add) if type(value) is int else value for value in rest]
        snapshot = Snapshot(self._module)
        with watch.watching(self._module, forward=True):
            output = self._eager_step(batch, *rest)
        output = watch.note_output(output, self._module.training_step)
        watch.add_changes(snapshot.changes())
        if not isinstance(loss_of(output), Tensor):
            what = (
                "`training_step` returned no loss. Return one that is zero, so that every step is"
                " the same."
            )
            watch.add(what, watch.program)
        shape.add(watch, self._trainer.current_epoch)
        self._watching, self._watched_inputs = shape, tensors_in(batch)
        return output

    def _may_go_on(self, problems: list[Problem]) -> bool:
        """Whether there are no problems, on any rank; else all refuse."""
        if not self._ranks.have_none(problems):
            self._refuse(problems)
        return not self._refused

    def _capture(self, shape: Shape, batch: Any, rest: list) -> CapturedStep:
        watch = shape.watches[-1]
        engine = getattr(self._trainer.strategy, "engine", None)
        books = self._gradients if engine is None else ReplayedStep(engine)
        step = CapturedStep(self._graphs.make_pair(watch.generators, watch.random.offsets), books)
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

    def _refuse(self, problems: list[Problem]) -> None:
        """On all ranks, of which one at least has problems."""
        self._ranks.report("the training step", problems)
        self.drop()
        self._refused = True

    # ---- backward ----------------------------------------------------------------------------

    def _backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        def run() -> None:
            self._eager_backward(tensor, *args, **kwargs)

        step, self._current = self._current, None
        shape, self._watching = self._watching, None
        if step is not None:
            step.replay_backward(run)
        elif shape is not None:
            watch, inputs, self._watched_inputs = shape.watches[-1], self._watched_inputs, []
            with watch.watching(self._module, forward=False):
                run()
            if any(tensor.grad is not None for tensor in inputs):
                what = (
                    "A tensor of the batch gets a gradient, which a replay would leave with its"
                    " copy of the batch."
                )
                watch.add(what, watch.program)
            if shape.graphs is not None and (problems := watch.problems or compare(*shape.watches)):
                self._stale = problems[0].what
        else:
            run()
