"""`Runner`: what of a training is captured, and what all ranks decide about it together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch._functorch import config as functorch_config

from ...strategies.collectives import Meeting
from ...strategies.communicators import make_collectives
from .fingerprint import names_read
from .modules import CapturedModule, find_modules
from .optimizer import CapturedOptimizer
from .program import Part, Program, Record, signature

# of `zero3`, which rule graphs out
_OPTIONS = "offload", "activations", "debug", "reduce_once", "stop_on_nonfinite"
_LEAST = torch.iinfo(torch.int64).min


class GraphCaptureError(RuntimeError):
    """With ``strict``, something cannot be captured, or is not what the eager step computes."""


class Step(Program):
    """Replaces the module's ``training_step``."""

    _last = -1

    def __init__(self, fit: Any) -> None:
        super().__init__("the training step", fit, fit.root, "training_step")
        self.engine = fit.engine

    def drop(self) -> None:
        """Free all graphs, and with them the memory pool."""
        super().drop()
        for part in self.fit.parts[1:]:
            part.drop()
        self.fit.graphs.pools.clear()
        if self.engine is not None:
            self.engine.pool.is_captured = False

    def decide(self, inputs: Any) -> Record | None:
        """See :meth:`Program.decide`; collective.

        All ranks know the signatures of all, so they take the same decisions. On all ranks this
        method also does what one of them needs: stop capturing, drop graphs that are out of date,
        or run an optimizer's update eagerly.
        """
        now = self.fit.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if now == self._last:
            return None  # it runs again for the same micro-batch
        self._last, changes = now, self.changes()
        digest = hash(signature(inputs[0][0], self.fit.device)) >> 1  # an int64 above the least
        digests, is_stale = self.fit.agree([digest, bool(changes)])
        if self.is_eager:
            return None
        if any(is_stale):
            self.recapture(changes)
        record = self.choose(digests)
        if record is not None and record.is_replay and record.graphs is None:
            if not any(record.given):
                self.problems.append(
                    "`training_step` returned no loss, or one that needs no gradient, or no"
                    " backward of it came. Return one that is zero, so that every step is the same."
                )
            self.fit.agree()
        return None if self.is_eager else record


class Runner:
    """Captures the parts of a training during a fit.

    Args:
        trainer: the trainer of the fit.
        graphs: makes the graphs: `CudaGraphs` or `SoftwareGraphs`.
        options: the `CUDAGraphStep`.

    Attributes:
        root: the module that is trained.
        device: the device of the training.
        engine: the engine of `zero3`; None with other strategies.
        stack: leaves everything as it was before the fit.
        parts: what is captured.
        step: the training step, if it is captured as a whole.
    """

    def __init__(self, trainer: Trainer, graphs: Any, options: Any) -> None:
        self.trainer, self.root = trainer, trainer.lightning_module
        self.graphs, self.options, self.device = graphs, options, trainer.strategy.root_device
        self.engine: Any = getattr(trainer.strategy, "engine", None)
        self.stack, self.parts = ExitStack(), list[Part]()
        self.step: Step | None = None
        group = dist.group.WORLD if self.trainer.world_size > 1 else None
        self._communicator = (
            make_collectives(group, self.device) if self.engine is None else self.engine.collectives
        )
        self._size = self._communicator.world_size * self._communicator.replicas

    def install(self) -> None:
        """Replace the methods of what is captured; collective."""
        self.stack.enter_context(self.graphs.in_stream())
        # What `torch.compile` makes from here on can be differentiated twice.
        self.stack.enter_context(functorch_config.patch(donated_buffer=False))
        patterns, optimizers = self.options.modules, self.trainer.optimizers
        problems = check_run(self.trainer, patterns is None)
        found = {} if patterns is None else find_modules(self.root, patterns)
        if any(flag for (flag,) in self._gather([bool(problems)])):
            self._report("the training step" if patterns is None else "a module", problems)
        elif patterns is not None:
            self.parts = [
                CapturedModule(f"module {name!r}", self, module, "forward")
                for name, module in found.items()
            ]
        else:
            self.step = Step(self)
            captured = optimizers if self.options.optimizer else []
            self.parts = [self.step, *(CapturedOptimizer(each, self) for each in captured)]

    def uninstall(self) -> None:
        """Free the graphs and restore all methods."""
        for part in self.parts:
            part.drop()
        self.parts = []
        self.graphs.pools.clear()
        self.stack.close()

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the ``numbers`` of each rank, in rank order; equally many, above the least int64.

        The exchange runs on the host and waits for no device.

        Raises:
            DivergenceError: another rank of `zero3` has come to another exchange.
        """
        if self._size == 1 or not numbers:
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

        Return for each of ``numbers``, of which each rank has equally many, those of all ranks.

        Raises:
            GraphCaptureError: with ``strict``, on all ranks, if there is something to stop.
        """
        # hazard: all ranks must exchange equally many numbers. A part that is eager without new
        # problems is so on all ranks, so this list is the same everywhere.
        parts = [part for part in self.parts if part.problems or not part.is_eager]
        flags = [bool(part.problems) for part in parts]
        columns = list(zip(*self._gather([*numbers, *flags]), strict=True))
        for part, has_problems in zip(parts, columns[len(numbers) :], strict=True):
            if any(has_problems):
                problems, part.problems = part.problems, []
                part.is_eager = True
                part.drop()
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
        if self.options.strict:
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
        counts = [
            f"{part.name}: {part.replays} of {part.steps} runs replayed, {part.verified} verified"
            for part in self.parts
        ]
        return "\n  ".join([f"CUDAGraphStep: memory: {', '.join(sizes)}", *counts])


def check_run(trainer: Trainer, is_step: bool) -> list[str]:
    """Return what is known before the first step to rule out captures of it, or of modules."""
    strategy, module = trainer.strategy, trainer.lightning_module
    is_zero3 = getattr(strategy, "strategy_name", "") == "zero3"
    settings = [os.environ.get(f"PYTORCH_{n}_CONF", "") for n in ("CUDA_ALLOC", "ALLOC")]
    is_expandable = any("expandable_segments:True" in setting for setting in settings)
    has_registration = os.environ.get("NCCL_GRAPH_REGISTER") != "0"
    reasons: dict[str, Any] = {
        f"The strategy {type(strategy).__name__} is not known to work. Use one device, `ddp` or"
        " `zero3`.": not (is_zero3 or isinstance(strategy, SingleDeviceStrategy | DDPStrategy)),
        "NCCL registers the memory of graphs, which hangs with expandable_segments. Set"
        " NCCL_GRAPH_REGISTER=0.": is_expandable and has_registration and trainer.world_size > 1,
    }
    for option in _OPTIONS:
        value = getattr(strategy, f"_{option}", None)
        reasons[
            f"`Zero3Strategy({option}=...)` waits for the host, or does something else in some"
            " micro-batches, as no graph can. Leave it out."
        ] = value is not None and value is not False
    if not is_step:
        reasons |= {
            "With `zero3` on several ranks weights of single modules lie where others lay before."
            " Capture the whole step.": is_zero3 and trainer.world_size > 1
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
            "`Trainer(detect_anomaly=True)` looks at values on the host.": trainer._detect_anomaly,
        }
    return [reason for reason, holds in reasons.items() if holds]
