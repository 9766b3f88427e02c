"""`Runner`: what of a training is captured, and what all ranks decide about it together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch._functorch import config as functorch_config

from ...strategies.collectives import Meeting, make_collectives
from ...strategies.liveness import Activity
from .fingerprint import names_read
from .modules import CapturedModule, find_modules
from .optimizer import CapturedOptimizer
from .program import Fit, NotCapturable, Part, Program, Record, Run, signature

_LEAST = torch.iinfo(torch.int64).min
_NO_LOSS = (
    "`training_step` returned no loss. Return one that is zero, so that every step is the same."
)


class GraphCaptureError(RuntimeError):
    """With ``strict``, something cannot be captured, or is not what the eager step computes."""


class Step(Program):
    """Replaces ``training_step``: of the module, or with `zero3`, which exchanges inside, the
    strategy's.

    Args:
        runner: the runner.

    Attributes:
        steps: number of micro-batches so far; those that are not replayed run eagerly.
        is_replay: whether the current micro-batch is replayed.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, strategy = runner, runner.trainer.strategy
        owner = runner.root if runner.engine is None else strategy
        super().__init__("the training step", runner, runner.root, "training_step", owner)
        self.steps, self.is_replay = 0, False

    def drop(self) -> None:
        """Free all graphs, and with them the memory pool."""
        super().drop()
        for part in self._runner.parts[1:]:
            part.drop()
        self.fit.graphs.renew_pools()

    def stop(self) -> None:
        """Run eagerly from now on."""
        super().stop()
        if self.engine is not None:
            self.engine.expect_graphs(False)

    @property
    def engine(self) -> Any:
        """The engine of `zero3`, to whose gradients the step adds."""
        return self.fit.engine

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of ``training_step``."""
        self.is_replay, self.steps = False, self.steps + 1
        run, record = (Run.PLAIN, Record()) if self.is_eager else self._choose(args[0])
        if run is Run.PLAIN:
            return self.eager(*args, **kwargs)
        self.is_replay = run in (Run.CAPTURE, Run.REPLAY)
        watch = getattr(self.fit.trainer.strategy, "watch", None)
        with nullcontext() if watch is None else watch.doing(Activity.FORWARD):
            output = self.run(run, record, (args, kwargs))
        if output is None:  # and no backward comes
            (record.problems if record.graphs is None else self.problems).append(_NO_LOSS)
        return output

    def _choose(self, batch: Any) -> tuple[Run, Record]:
        """Return how to run a micro-batch, and its record; collective.

        All ranks know the signatures of all, so they take the same decisions. On all ranks this
        method also does what one of them needs: stop capturing, drop graphs that are out of date,
        or run an optimizer's update eagerly.
        """
        digest = 0
        try:
            digest = hash(signature(batch)) >> 1  # an int64 above the least
        except NotCapturable as error:
            self.problems.append(str(error))
        changes = self.changes()
        digests, is_stale = self._runner.agree([digest, bool(changes)])
        if self.is_eager:
            return Run.PLAIN, Record()
        if any(is_stale):
            self.recapture(changes)
        run, record = self.choose(digests)
        if run is Run.CAPTURE:
            self._runner.agree()
        return (Run.PLAIN, Record()) if self.is_eager else (run, record)


class Runner(Fit):
    """Captures the parts of a training during a fit.

    Args:
        arguments: those of `Fit`.

    Attributes:
        parts: what is captured.
        step: the training step, if it is captured as a whole.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.parts = list[Part]()
        self.step: Step | None = None
        group = dist.group.WORLD if self.trainer.world_size > 1 else None
        self._communicator = (
            make_collectives(group, self.device) if self.engine is None else self.engine.collectives
        )
        self._size = self._communicator.world_size * self._communicator.replicas
        self._stack = ExitStack()

    def install(self, optimizer: bool, patterns: list[str] | None) -> None:
        """Replace the methods of what is captured; collective.

        Args:
            optimizer: capture the optimizers' updates beside the step.
            patterns: names of modules to capture instead of the step.
        """
        self._stack.enter_context(self.graphs.in_stream())
        # What `torch.compile` makes from here on can be differentiated twice.
        self._stack.enter_context(functorch_config.patch(donated_buffer=False))
        problems = check_run(self.trainer, patterns is None)
        found = {} if patterns is None else find_modules(self.root, patterns)
        if any(flag for (flag,) in self._gather([bool(problems)])):
            self._report("the training step" if patterns is None else "a module", problems)
        elif patterns is not None:
            self.parts = [CapturedModule(name, module, self) for name, module in found.items()]
        else:
            self.step = Step(self)
            optimizers = self.trainer.optimizers if optimizer else []
            self.parts = [self.step, *(CapturedOptimizer(each, self) for each in optimizers)]

    def uninstall(self) -> None:
        """Free the graphs and restore all methods."""
        for part in self.parts:
            part.uninstall()
        self.parts = []
        self.graphs.renew_pools()
        self._stack.close()

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the ``numbers`` of each rank, in rank order.

        The exchange runs on the host and waits for no device.

        Args:
            numbers: an equal count on each rank, each above the least int64.

        Raises:
            DivergenceError: another rank of `zero3` has come to another exchange.
        """
        if self._size == 1:
            return [list(numbers)]
        # `agree` returns the maximum over ranks; each rank fills in its own row only.
        rows = torch.full((self._size, len(numbers)), _LEAST, dtype=torch.int64, device="cpu")
        rows[self._communicator.global_rank] = torch.tensor(numbers, device="cpu")
        gathered = self._communicator.agree(rows.view(-1), Meeting.GRAPHS).view(rows.shape).tolist()
        if self.engine is None:
            # Without an engine no code compares the log of exchanges, or empties it.
            self._communicator.exchange_log.suspend_trace()
        return gathered

    def agree(self, numbers: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Stop capturing on all ranks what one rank cannot capture; collective.

        Args:
            numbers: an equal count on each rank.

        Returns:
            For each of ``numbers`` those of all ranks.

        Raises:
            GraphCaptureError: with ``strict``, on all ranks, if there is something to stop.
        """
        # hazard: all ranks must exchange equally many numbers. A part that is eager without new
        # problems is so on all ranks, so this list is the same everywhere.
        parts = [part for part in self.parts if part.problems or not part.is_eager]
        flags = [bool(part.problems) for part in parts]
        if not numbers and not flags:
            return []
        columns = list(zip(*self._gather([*numbers, *flags]), strict=True))
        for part, has_problems in zip(parts, columns[len(numbers) :], strict=True):
            if any(has_problems):
                problems, part.problems = part.problems, []
                part.stop()
                self._report(part.name, problems)
        return columns[: len(numbers)]

    def _report(self, subject: str, problems: list[str]) -> None:
        """Warn once, on rank 0, that ``subject`` cannot be captured; collective.

        The message has the reasons of the first rank that knows any.

        Raises:
            GraphCaptureError: with ``strict``, on all ranks.
        """
        gathered = self._communicator.all_gather_object(problems)
        rank, found = next((rank, found) for rank, found in enumerate(gathered) if found)
        where = "" if all(gathered) else f" on rank {rank}"
        text = f"CUDAGraphStep: {subject} cannot be captured{where}:\n" + "\n".join(
            f"  - {problem}" for problem in dict.fromkeys(found)
        )
        if self.strict:
            raise GraphCaptureError(text)
        rank_zero_warn(
            f"{text}\nIt runs without a graph on all ranks. `CUDAGraphStep(strict=True)` makes this"
            " an error."
        )

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs of all graphs."""
        return sum(graphs.input_nbytes for part in self.parts for graphs in part.graphs)

    def memory_bytes(self) -> dict[str, int]:
        """See :meth:`CUDAGraphStep.memory_bytes`."""
        return {"pool": self.graphs.pool_nbytes(), "inputs": self.input_nbytes}

    def summary(self) -> str:
        """Return some lines about the run."""
        sizes = [f"{n} {size / 2**20:.1f} MiB" for n, size in self.memory_bytes().items()]
        if self.step is None:
            counts = ", ".join(f"{part.name} {part.replays} times" for part in self.parts)
            return f"CUDAGraphStep: replayed {counts or 'nothing'}\n  memory: {', '.join(sizes)}"
        step = self.step
        shapes = f"{len(step.graphs)} shape{'s' * (len(step.graphs) != 1)}"
        return (
            f"CUDAGraphStep: {step.replays} of {step.steps} micro-batches replayed, of {shapes}"
            f"\n  {step.verified} verified; memory: {', '.join(sizes)}"
        )


def check_run(trainer: Trainer, is_step: bool) -> list[str]:
    """Return what is known before the first step to rule out captures.

    Args:
        trainer: the trainer of the run.
        is_step: whether the whole step is captured, and not single modules.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    engine = getattr(strategy, "engine", None)
    is_zero3 = getattr(strategy, "strategy_name", "") == "zero3"
    settings = [os.environ.get(f"PYTORCH_{n}_CONF", "") for n in ("CUDA_ALLOC", "ALLOC")]
    is_expandable = any("expandable_segments:True" in setting for setting in settings)
    has_registration = os.environ.get("NCCL_GRAPH_REGISTER") != "0"
    reasons = {
        f"The strategy {type(strategy).__name__} is not known to work. Use one device, `ddp` or"
        " `zero3`.": not (is_zero3 or isinstance(strategy, SingleDeviceStrategy | DDPStrategy)),
        "`offload` and `activations` wait for the host, which a captured step cannot. Leave out one"
        " of the two.": engine is not None and (engine.host or engine.activations) is not None,
        "`Zero3Strategy(debug=True)` looks at values on the host.": getattr(
            strategy, "_debug", False
        ),
        "`Zero3Strategy(reduce_once=True)` exchanges something else in each micro-batch of a"
        " window. Leave it out.": getattr(strategy, "_reduce_once", False),
        "NCCL registers the memory of graphs, which hangs with expandable_segments. Set"
        " NCCL_GRAPH_REGISTER=0.": is_expandable and has_registration and trainer.world_size > 1,
    }
    if not is_step:
        reasons |= {
            "With `zero3` on several ranks weights of single modules lie where others lay before."
            " Capture the whole step.": is_zero3 and trainer.world_size > 1,
            "`Zero3Strategy(stop_on_nonfinite=True)` looks at what units inside of modules"
            " compute.": getattr(strategy, "_stop_on_nonfinite", False),
        }
    else:
        loggers = names_read(module, "training_step") & {"logger", "loggers"}
        reasons |= {
            "The module optimizes manually: its `training_step` runs backward and the optimizer"
            " itself.": not module.automatic_optimization,
            "`training_step(self, dataloader_iter)` fetches batches itself. Take a batch.": (
                is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)
            ),
            f"`training_step` mentions `{min(loggers, default='')}`, and a graph would use it only"
            " once, at its capture. Use `self.log`, or do it in `on_train_batch_end`.": loggers,
            "LBFGS runs a step several times; how often depends on values.": any(
                isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers
            ),
            "`Trainer(detect_anomaly=True)` looks at values on the host.": trainer._detect_anomaly,
        }
    return [reason for reason, holds in reasons.items() if holds]
