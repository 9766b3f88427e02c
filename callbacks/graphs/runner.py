"""`Runner`: what of a training is captured, and what all ranks decide about it together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parallel import DistributedDataParallel

from ...strategies.collectives import Meeting, make_collectives
from .fingerprint import names_read
from .modules import CapturedModule, find_modules
from .optimizer import CapturedOptimizer
from .program import Fit, Part
from .step import Step

_LEAST = torch.iinfo(torch.int64).min


class GraphCaptureError(RuntimeError):
    """With ``strict``, something cannot be captured, or is not what the eager step computes."""


class Runner:
    """Captures the parts of a training during a fit.

    Args:
        fit: the fit.

    Attributes:
        parts: what is captured.
        step: the training step, if it is captured as a whole.
    """

    def __init__(self, fit: Fit) -> None:
        self._fit, self.parts = fit, list[Part]()
        self.step: Step | None = None
        group = dist.group.WORLD if fit.trainer.world_size > 1 else None
        self._communicator = (
            make_collectives(group, fit.device) if fit.engine is None else fit.engine.collectives
        )
        self._size = self._communicator.world_size * self._communicator.replicas

    def install(self, optimizer: bool, patterns: list[str] | None) -> None:
        """Replace the methods of what is captured; collective.

        Args:
            optimizer: capture the optimizers' updates beside the step.
            patterns: names of modules to capture instead of the step.
        """
        fit, trainer = self._fit, self._fit.trainer
        fit.graphs.enter_stream()
        problems = check_run(trainer, patterns is None)
        found = {} if patterns is None else find_modules(fit.root, patterns)
        if any(flag for (flag,) in self._gather([bool(problems)])):
            self._report("the training step" if patterns is None else "a module", problems)
        elif patterns is not None:
            self.parts = [CapturedModule(name, module, fit) for name, module in found.items()]
        else:
            step = self.step = Step(fit, self.agree, self._free_pool)
            optimizers = trainer.optimizers if optimizer else []
            updates = [CapturedOptimizer(each, fit, lambda: step.is_replay) for each in optimizers]
            self.parts = [step, *updates]

    def _free_pool(self) -> None:
        for part in self.parts[1:]:
            part.drop()
        self._fit.graphs.renew_pools()

    def uninstall(self) -> None:
        """Free the graphs and restore all methods."""
        for part in self.parts:
            part.uninstall()
        self.parts = []
        self._fit.graphs.renew_pools()
        self._fit.graphs.leave_stream()

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
        if self._fit.engine is None:
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
        if self._fit.strict:
            raise GraphCaptureError(text)
        rank_zero_warn(
            f"{text}\nIt runs without a graph on all ranks. `CUDAGraphStep(strict=True)` makes this"
            " an error."
        )

    @property
    def input_nbytes(self) -> int:
        """Bytes of the static inputs of all graphs."""
        return sum(part.input_nbytes for part in self.parts)

    def memory_bytes(self) -> dict[str, int]:
        """See :meth:`CUDAGraphStep.memory_bytes`."""
        return {
            "pool": self._fit.graphs.pool_nbytes(),
            "inputs": self.input_nbytes,
            "gradients": 0 if self.step is None else self.step.gradients.nbytes,
        }

    def summary(self) -> str:
        """Return one line about the run."""
        sizes = [f"{n} {size / 2**20:.1f} MiB" for n, size in self.memory_bytes().items()]
        if self.step is None:
            counts = ", ".join(f"{part.name} {part.replays} times" for part in self.parts)
            return f"CUDAGraphStep: replayed {counts or 'nothing'}; {', '.join(sizes)}"
        step = self.step
        return (
            f"CUDAGraphStep: {step.replays} of {step.steps} micro-batches replayed,"
            f" {step.verified} verified, {len(step.graphs)} shapes captured; comparing took"
            f" {step.seconds:.2f} s; {', '.join(sizes)}"
        )


def check_run(trainer: Trainer, is_step: bool) -> list[str]:
    """Return what is known before the first step to rule out captures.

    Args:
        trainer: the trainer of the run.
        is_step: whether the whole step is captured, and not single modules.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    is_known = isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
    settings = [os.environ.get(f"PYTORCH_{n}_CONF", "") for n in ("CUDA_ALLOC", "ALLOC")]
    is_expandable = any("expandable_segments:True" in setting for setting in settings)
    has_registration = os.environ.get("NCCL_GRAPH_REGISTER") != "0"
    reasons = {
        f"The strategy {type(strategy).__name__} is not known to work. Use one device, `ddp` or"
        " `zero3`.": not is_known and getattr(strategy, "strategy_name", "") != "zero3",
        "`Zero3Strategy(debug=True)` looks at values on the host.": getattr(
            strategy, "_debug", False
        ),
        "`Zero3Strategy(reduce_once=True)` exchanges something else in each micro-batch of a"
        " window. Leave it out.": getattr(strategy, "_reduce_once", False),
        "NCCL registers the memory of graphs, which hangs with expandable_segments. Set"
        " NCCL_GRAPH_REGISTER=0.": is_expandable and has_registration and trainer.world_size > 1,
    }
    if not is_step:
        reasons[
            "`Zero3Strategy(stop_on_nonfinite=True)` looks at what units inside of modules compute."
        ] = getattr(strategy, "_stop_on_nonfinite", False)
    else:
        ddp: Any = strategy.model if isinstance(strategy.model, DistributedDataParallel) else None
        hooks = [getattr(hook, "__qualname__", "") for hook, _ in ddp._comm_hooks] if ddp else []
        loggers = names_read(module, "training_step") & {"logger", "loggers"}
        reasons |= {
            "`DDPStrategy(gradient_as_bucket_view=True)` makes DDP replace the gradients that a"
            " graph adds to. Leave it out.": ddp and ddp.gradient_as_bucket_view,
            f"`DDPStrategy(ddp_comm_hook=...)`, {''.join(hooks)}, is Python, which would run only"
            " once. Leave it out.": hooks,
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
