"""`Runner`: what of a training is captured, and what all ranks decide about it together.

A `Step` and a `CapturedModule` decide before each run how to do it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch._functorch import config as functorch_config

from ...strategies.collectives import Meeting
from ...strategies.communicators import make_collectives
from ...strategies.support import NO_GRAPH_TASK, graph_task
from .fingerprint import names_read
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

        All ranks know the signatures of all, and whose graphs are out of date, so they take the
        same decisions.
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
        if record is not None and record.graphs is None and not record.eager_runs:
            if not any(record.given):
                self.problems.append(
                    "`training_step` returned no loss, or one that needs no gradient, or no"
                    " backward of it came. Return one that is zero, so that every step is the same."
                )
            self.fit.agree()
        return None if self.is_eager else record


class CapturedModule(Program):
    """Replaces the ``forward`` of a module. Each rank decides by its own inputs what it captures,
    and when: modules exchange nothing inside, and ranks may run them different numbers of times.
    """

    has_own_pool = True

    def decide(self, inputs: Any) -> Record | None:
        """See :meth:`Program.decide`."""
        if graph_task() != NO_GRAPH_TASK:  # a backward runs it
            self.problems.append(
                "a checkpoint runs it, and again in the backward. Put the checkpoint inside of the"
                " module."
            )
        if changes := self.changes():
            self.recapture(changes)
        device = self.fit.device
        is_on, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        record = self.choose((signature(inputs, device), is_on(device.type), dtype(device.type)))
        self.is_eager |= bool(self.problems)  # the other ranks follow before the next batch
        if self.is_eager or record is None:
            return None
        if record.graphs is not None and record.graphs.waiting:
            return None  # it runs twice before a backward
        if not (record.eager_runs or any(record.given)):
            record.eager_runs = 1  # the backward of the last run may be still to come
        return record

    def _look(self, inputs: Any) -> dict[str, Any]:
        """Return what a replay leaves as it is, by what changes it."""
        group: Any = dist.group.WORLD if dist.is_initialized() else None
        # Ranks need not capture a module at the same time.
        exchanges = group and group._get_sequence_number_for_group()
        return super()._look(inputs) | {"exchanges something with other ranks": exchanges}


class Runner:
    """Captures the parts of a training during a fit.

    Args:
        graphs: makes the graphs: `CudaGraphs` or `SoftwareGraphs`.
        options: the `CUDAGraphStep`.

    Attributes:
        root: the module that is trained.
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
        group = dist.group.WORLD if trainer.world_size > 1 else None
        self._communicator = (
            make_collectives(group, self.device) if self.engine is None else self.engine.collectives
        )

    def install(self) -> None:
        """Replace the methods of what is captured; collective."""
        self.stack.enter_context(self.graphs.in_stream())
        # What `torch.compile` makes from here on can be differentiated twice.
        self.stack.enter_context(functorch_config.patch(donated_buffer=False))
        patterns = self.options.modules
        subject = "the training step" if patterns is None else "a module"
        modules = {} if patterns is None else find_modules(self.root, patterns)
        problems = check_run(self.trainer, patterns is None)
        if any(self.agree([bool(problems)])[0]):
            self._report(subject, problems)
        elif patterns is None:
            self.step = Step(self)
            optimizers = self.trainer.optimizers if self.options.optimizer else []
            self.parts = [self.step, *(CapturedOptimizer(each, self) for each in optimizers)]
        else:
            self.parts = [
                CapturedModule(f"module {name!r}", self, module, "forward")
                for name, module in modules.items()
            ]

    def uninstall(self) -> None:
        """Free the graphs and restore all methods."""
        for part in self.parts:
            part.drop()
        self.parts = []
        self.graphs.pools.clear()
        self.stack.close()

    def agree(self, numbers: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Stop capturing on all ranks what one rank cannot capture; collective, on the host.

        Return for each of ``numbers``, of which each rank has equally many, those of all ranks.

        Raises:
            GraphCaptureError: with ``strict``, on all ranks, if there is something to stop.
            DivergenceError: another rank of `zero3` has come to another exchange.
        """
        # hazard: all ranks must exchange equally many numbers. A part that is eager without new
        # problems is so on all ranks, so this list is the same everywhere.
        parts = [part for part in self.parts if part.problems or not part.is_eager]
        mine = torch.tensor([*numbers, *(bool(part.problems) for part in parts)], device="cpu")
        rows = torch.full((self.trainer.world_size, len(mine)), _LEAST, device="cpu")
        rows[self.trainer.global_rank] = mine
        if rows.numel() > len(mine):
            # The communicator's `agree` returns the maximum over ranks of each number.
            rows = self._communicator.agree(rows.view(-1), Meeting.GRAPHS).view(rows.shape)
            if self.engine is None:
                # Without an engine no code compares the log of exchanges, or empties it.
                self._communicator.exchange_log.suspend_trace()
        columns = [tuple(column) for column in rows.T.tolist()]
        for part, has_problems in zip(parts, columns[len(numbers) :], strict=True):
            if any(has_problems):
                problems, part.problems = part.problems, []
                part.is_eager = True
                part.drop()
                self._report(part.name, problems)
        return columns[: len(numbers)]

    def _report(self, subject: str, problems: list[str]) -> None:
        """Warn once, on rank 0, of the problems of the first rank that has any; collective.

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

    def summary(self) -> str:
        """Return a line about each part."""
        counts = [
            f"{part.name}: {part.replays} of {part.steps} runs replayed, {part.verified} verified"
            for part in self.parts
        ]
        return "\n  ".join(["CUDAGraphStep:", *counts])


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
            f"`training_step` mentions `{min(loggers, default='')}`, and a graph would use it only"
            " once, at its capture. Use `self.log`, or do it in `on_train_batch_end`.": loggers,
            "`Trainer(detect_anomaly=True)` looks at values on the host.": trainer._detect_anomaly,
        }
    return [reason for reason, holds in reasons.items() if holds]
