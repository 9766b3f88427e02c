"""`StepTimer`: measures the parts of a step by CUDA events, without waiting for the device."""

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ..memory.figures import render_table
from ..memory.ranks import RankGatherer, Spread, spread, to_metrics
from .clocks import HostClock, make_clock
from .communication import Communication

Part = Literal["data", "forward", "backward", "optimizer", "other"]
# in the order of KEYS
PARTS: tuple[Part, ...] = ("data", "forward", "backward", "optimizer", "other")
KEYS = {
    "time/step_ms": "ms: one optimizer step, from the end of the one before",
    "time/data_ms": "ms: waiting for the batch and moving it to the device",
    "time/forward_ms": "ms: training_step",
    "time/backward_ms": "ms: backward, with the communication inside of it",
    "time/optimizer_ms": "ms: clipping and the optimizer's step",
    "time/other_ms": "ms: callbacks, logging, validation and checkpoints between batches",
    "time/communication_ms": (
        "ms: in collectives, beside the computation too, with zero3, FSDP2 and DDP"
    ),
}


class StepTimer(Callback):
    """Logs the time of each part of a step, the mean since the last logging step, under `KEYS`.

    Without a logger it prints a table of the whole run when fitting ends.

    With CUDA it times the parts by events in the stream of the training, so the time of a part is
    the device's, and the host never waits: steps that the device has not finished count at a later
    logging step. Without CUDA it uses the host's clock. Over several ranks a key has the time of
    the slowest rank, with `/min`, `/mean` and `/max_rank`, from one packed all-gather.

    `time/communication_ms` needs zero3 or FSDP2, whose collectives this callback times, or DDP,
    which times its own gradient reduction in the iterations that it samples. Elsewhere the key is
    absent.

    Args:
        every_n_steps: optimizer steps between logging; None takes the Trainer's
            `log_every_n_steps`.
    """

    def __init__(self, *, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps: expected at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._clear()

    def _clear(self) -> None:
        self.clock: HostClock | None = None
        self.gatherer: RankGatherer | None = None
        # (part, mark of its beginning, whether a step ended there)
        self._marks: deque[tuple[Part, Any, bool]] = deque()
        self._totals = dict.fromkeys(PARTS, 0.0)  # seconds of the steps since the last logging step
        self._steps = 0  # number of these steps
        self._last_step = self._last_logged = 0
        self._communication: Communication | None = None
        self._communicated: float | None = None  # seconds in all, at the last logging step

    def make_clock(self, device: torch.device) -> HostClock:
        """Return the clock of a run; override it to supply other times."""
        return make_clock(device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clear()
        self.clock = self.make_clock(trainer.strategy.root_device)
        self.gatherer = RankGatherer()
        self._last_step = self._last_logged = trainer.global_step
        engine = getattr(trainer.strategy, "engine", None)
        self._communication = Communication(engine, pl_module, trainer.strategy.root_device)
        self._communicated = self._communication.seconds()
        self._begin_part("data")

    def _begin_part(self, part: Part, ends_step: bool = False) -> None:
        if self.clock is None:  # a validation before the training
            return
        mark = self.clock.mark()
        if mark is not None:
            self._marks.append((part, mark, ends_step))

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begin_part("forward")

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        self._begin_part("backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_part("optimizer")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        has_stepped = step != self._last_step
        self._last_step = step
        self._begin_part("other", ends_step=has_stepped)
        # Lightning does not declare its attribute
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if trainer.loggers and every and step // every > self._last_logged // every:
            self._last_logged = step
            metrics = to_metrics(self._measure(trainer), self._world_size, list(KEYS))
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
        elif len(self._marks) > 1000:  # rare logging must not pile up marks
            self._add_finished_steps()
        self._begin_part("data")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_part("other")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin_part("data")

    def _add_finished_steps(self) -> None:
        """Add up the parts of the steps that the device has finished.

        The mark at the end of the last one stays, as the beginning of the next step.
        """
        assert self.clock is not None
        ends = [
            position
            for position, (_, _, ends_step) in enumerate(self._marks)
            if ends_step and position
        ]
        while ends and not self.clock.is_done(self._marks[ends[-1]][1]):
            ends.pop()
        for _ in range(ends[-1] if ends else 0):
            part, beginning, _ = self._marks.popleft()
            self._totals[part] += self.clock.between(beginning, self._marks[0][1])
        self._steps += len(ends)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Without a logger, print the means of the run on rank 0; collective then.

        hazard: either every rank gets here, or none.
        """
        if trainer.loggers:
            return
        self._add_finished_steps()
        steps, figures = self._steps, self._measure(trainer)
        if trainer.is_global_zero and steps:
            title = f"StepTimer: mean of {steps} steps"
            print(render_table(title, figures, self._world_size))

    @property
    def _world_size(self) -> int:
        assert self.gatherer is not None
        return self.gatherer.world_size

    def _measure(self, trainer: Trainer) -> Mapping[str, Spread]:
        """Gather the figures since the last time over ranks; collective.

        hazard: a rank whose device has finished no step yet must take part, too.
        """
        assert self.gatherer is not None and self._communication is not None
        self._add_finished_steps()
        ms = 1000 / self._steps if self._steps else float("nan")
        now, before = self._communication.seconds(), self._communicated
        figures = [sum(self._totals.values()) * ms, *(self._totals[part] * ms for part in PARTS)]
        figures.append(
            _read_ddp_communication_ms(trainer)
            if now is None or before is None
            else (now - before) * ms
        )
        self._totals = dict.fromkeys(PARTS, 0.0)
        # Without a finished step this communication counts at the next logging step.
        self._communicated = now if self._steps else before
        self._steps = 0
        return spread(list(KEYS), self.gatherer.gather(figures))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.gatherer is not None:
            self.gatherer.close()
        if self._communication is not None:
            self._communication.close()
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out marks and process groups, which belong to their process."""
        return {"every_n_steps": self.every_n_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.every_n_steps = state["every_n_steps"]
        self._clear()


def _read_ddp_communication_ms(trainer: Trainer) -> float:
    """Return DDP's mean over the iterations that it sampled, in ms; NaN without DDP or samples."""
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return float("nan")
    return model._get_ddp_logging_data().get("avg_backward_comm_time", 0) / 1e6 or float("nan")
