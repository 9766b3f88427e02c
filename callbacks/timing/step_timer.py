"""`StepTimer`: where the time of a step goes, by CUDA events, without waiting for the device."""

from collections import deque
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ...strategies.collectives import HostClock, make_clock
from ..memory.ranks import RankGatherer, spread, to_metrics
from .fsdp import FSDPCommunication

Part = Literal["data", "forward", "backward", "optimizer", "other"]
# in the order of KEYS
PARTS: tuple[Part, ...] = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "other",
)
KEYS = {
    "time/step_ms": "ms: one optimizer step, from the end of the one before",
    "time/data_ms": "ms: waiting for the batch and moving it to the device",
    "time/forward_ms": "ms: training_step",
    "time/backward_ms": "ms: backward, with the communication inside of it",
    "time/optimizer_ms": "ms: clipping and the optimizer's step",
    "time/other_ms": "ms: callbacks, logging, validation and checkpoints between batches",
    "time/communication_ms": (
        "ms: in collectives, beside the computation too, where the strategy tells"
    ),
}


class StepTimer(Callback):
    """Logs the time of each part of a step, the mean since the last logging step, under `KEYS`.

    With CUDA the parts are timed by events in the stream of the training, so a part is what the
    device spent on it, and nothing waits: steps that the device has not finished count at a later
    logging step. Without CUDA the host's clock is used. Over several ranks a key is the slowest
    rank's, with `/min`, `/mean` and `/max_rank`, from one packed all-gather.

    `time/communication_ms` is logged where the strategy can tell: one that has
    `communication_seconds() -> float` (total so far), as zero3 does; FSDP2, whose collectives are
    timed here; and DDP, which times its own gradient reduction at the iterations that it samples.
    Elsewhere the key is absent.

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
        # a part, when it began, whether a step ended there
        self._marks: deque[tuple[Part, Any, bool]] = deque()
        self._totals = dict.fromkeys(PARTS, 0.0)  # seconds, of the steps that were read
        self._steps = 0  # that were read
        self._last_step = self._last_logged = 0
        self._communicated: float | None = None  # seconds, at the last logging step
        self._fsdp: FSDPCommunication | None = None

    def make_clock(self, device: torch.device) -> HostClock:
        """Override to feed times of your own."""
        return make_clock(device)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clear()
        self.clock = self.make_clock(trainer.strategy.root_device)
        self.gatherer = RankGatherer()
        self._last_step = self._last_logged = trainer.global_step
        self._fsdp = FSDPCommunication(pl_module, trainer.strategy.root_device)
        self._communicated = self._communicated_seconds(trainer)
        self._begin("data")

    def _begin(self, part: Part, ends_step: bool = False) -> None:
        if self.clock is None:  # validation before training
            return
        mark = self.clock.mark()
        if mark is not None:
            self._marks.append((part, mark, ends_step))

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begin("forward")

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        self._begin("backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("optimizer")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ended = trainer.global_step != self._last_step
        self._last_step = trainer.global_step
        self._begin("other", ends_step=ended)
        every = self.every_n_steps or trainer.log_every_n_steps
        if every and trainer.global_step // every > self._last_logged // every:
            self._last_logged = trainer.global_step
            self._log(trainer)
        elif len(self._marks) > 1000:  # of rare logging
            self._read()
        self._begin("data")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("other")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("data")

    def _read(self) -> None:
        """Add up the steps that the device has finished; the end of the last one stays as the next
        beginning.
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
            part, begun, _ = self._marks.popleft()
            self._totals[part] += self.clock.between(begun, self._marks[0][1])
            self.clock.recycle(begun)
        self._steps += len(ends)

    def _log(self, trainer: Trainer) -> None:
        """One collective, in which every rank takes part, also one whose device has finished no
        step yet.
        """
        assert self.gatherer is not None
        self._read()
        ms = 1000 / self._steps if self._steps else float("nan")
        now, before = self._communicated_seconds(trainer), self._communicated
        figures = [sum(self._totals.values()) * ms, *(self._totals[part] * ms for part in PARTS)]
        figures.append(
            _ddp_communication_ms(trainer) if now is None or before is None else (now - before) * ms
        )
        metrics = to_metrics(
            spread(list(KEYS), self.gatherer.gather(figures)), self.gatherer.world_size, list(KEYS)
        )
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        self._totals = dict.fromkeys(PARTS, 0.0)
        # of no step: it counts at the next logging step
        self._communicated = now if self._steps else before
        self._steps = 0

    def _communicated_seconds(self, trainer: Trainer) -> float | None:
        if self._fsdp:
            return self._fsdp.seconds()
        tell = getattr(trainer.strategy, "communication_seconds", None)
        return float(tell()) if tell is not None else None

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.gatherer is not None:
            self.gatherer.close()
        if self._fsdp is not None:
            self._fsdp.close()
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        """Marks and groups stay in their process."""
        return {"every_n_steps": self.every_n_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.every_n_steps = state["every_n_steps"]
        self._clear()


def _ddp_communication_ms(trainer: Trainer) -> float:
    """The mean over the iterations that DDP has sampled; NaN where it has not, or there is no
    DDP.
    """
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return float("nan")
    return model._get_ddp_logging_data().get("avg_backward_comm_time", 0) / 1e6 or float("nan")
