"""`StepTimer`: where the time of a step goes, by CUDA events, without waiting for the device."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from .memory_ranks import RankGatherer, spread, to_metrics

Part = Literal["data", "forward", "backward", "optimizer", "other"]
PARTS: tuple[Part, ...] = ("data", "forward", "backward", "optimizer", "other")  # in the order of KEYS
KEYS = {
    "time/step_ms": "ms: one optimizer step, from the end of the one before",
    "time/data_ms": "ms: waiting for the batch and moving it to the device",
    "time/forward_ms": "ms: training_step",
    "time/backward_ms": "ms: backward, with the communication inside of it",
    "time/optimizer_ms": "ms: clipping and the optimizer's step",
    "time/other_ms": "ms: callbacks, logging, validation and checkpoints between batches",
    "time/communication_ms": "ms: in collectives, as far as the strategy tells",
}


class WallClock:
    """Marks on the host, for runs without CUDA."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def is_done(self, mark: float) -> bool:
        """Always."""
        return True

    def between(self, first: float, second: float) -> float:
        """Milliseconds."""
        return (second - first) * 1000


class EventClock:
    """Marks in the current CUDA stream; they are read when the device has passed them."""

    def __init__(self) -> None:
        self._unused: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """Record an event; recycled ones, since creating them costs more than recording."""
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_done(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has passed it; asking does not wait."""
        return mark.query()

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Milliseconds on the device."""
        return first.elapsed_time(second)

    def recycle(self, marks: list[torch.cuda.Event]) -> None:
        """These will not be asked again."""
        self._unused.extend(marks)


class StepTimer(Callback):
    """Logs the time of each part of a step, the mean since the last logging step, under `KEYS`.

    With CUDA the parts are timed by events in the stream of the training, so a part is what the device
    spent on it, and nothing waits: events that the device has not reached are read at a later logging
    step. Without CUDA the host's clock is used. Over several ranks a key is the slowest rank's, with
    `/min`, `/mean` and `/max_rank`, from one packed all-gather.

    `time/communication_ms` is logged where the strategy can tell: one that has
    `communication_seconds() -> float` (total so far), and DDP, which times its own gradient reduction at
    the iterations that it samples. Elsewhere the key is absent.

    Args:
        every_n_steps: optimizer steps between logging; None takes the Trainer's `log_every_n_steps`.
    """

    def __init__(self, *, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps: expected at least 1, got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self._clear()

    def _clear(self) -> None:
        self.clock: Any = None
        self.gatherer: RankGatherer | None = None
        self._marks: deque[tuple[Part, Any]] = deque()  # a part and when it began, oldest first
        self._totals = dict.fromkeys(PARTS, 0.0)  # ms, of the marks that were read
        self._steps = 0
        self._last_step = self._last_logged = 0
        self._communicated: float | None = None  # seconds, at the last logging step

    def make_clock(self, device: torch.device) -> Any:
        """Override to feed times of your own."""
        return EventClock() if device.type == "cuda" else WallClock()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clear()
        self.clock = self.make_clock(trainer.strategy.root_device)
        self.gatherer = RankGatherer()
        self._last_step = self._last_logged = trainer.global_step
        self._communicated = _communicated_seconds(trainer)
        self._begin("data")

    def _begin(self, part: Part) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self._marks.append((part, self.clock.mark()))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin("forward")

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._begin("backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("optimizer")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._begin("other")
        if trainer.global_step != self._last_step:
            self._last_step = trainer.global_step
            self._steps += 1
        every = self.every_n_steps or trainer.log_every_n_steps
        if every and trainer.global_step // every > self._last_logged // every:
            self._last_logged = trainer.global_step
            self._log(trainer)
        self._begin("data")

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.clock is not None:
            self._begin("other")

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.clock is not None:
            self._begin("data")

    def _read(self) -> None:
        """Add up the marks that the device has passed; the last one of them stays as the next beginning."""
        read = []
        while len(self._marks) > 1 and self.clock.is_done(self._marks[1][1]):
            part, begun = self._marks.popleft()
            self._totals[part] += self.clock.between(begun, self._marks[0][1])
            read.append(begun)
        recycle: Callable[[list[Any]], None] | None = getattr(self.clock, "recycle", None)
        if recycle is not None:
            recycle(read)

    def _log(self, trainer: Trainer) -> None:
        assert self.gatherer is not None
        self._read()
        steps = max(1, self._steps)
        now, before = _communicated_seconds(trainer), self._communicated
        communicated = float("nan") if now is None or before is None else (now - before) * 1000 / steps
        if now is None and (per_step := _ddp_communication_ms(trainer)) is not None:
            communicated = per_step
        figures = [sum(self._totals.values()) / steps, *(self._totals[part] / steps for part in PARTS), communicated]
        spreads = spread(list(KEYS), self.gatherer.gather(figures))
        metrics = to_metrics(spreads, self.gatherer.world_size, list(KEYS))
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        self._totals = dict.fromkeys(PARTS, 0.0)
        self._steps = 0
        self._communicated = now

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.gatherer is not None:
            self.gatherer.close()
        self._clear()

    def __getstate__(self) -> dict[str, Any]:
        """Marks and groups stay in their process."""
        return {"every_n_steps": self.every_n_steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.every_n_steps = state["every_n_steps"]
        self._clear()


def _communicated_seconds(trainer: Trainer) -> float | None:
    tell = getattr(trainer.strategy, "communication_seconds", None)
    return float(tell()) if tell is not None else None


def _ddp_communication_ms(trainer: Trainer) -> float | None:
    """The mean over the iterations that DDP has sampled."""
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return None
    nanoseconds = model._get_ddp_logging_data().get("avg_backward_comm_time", 0)
    return nanoseconds / 1e6 if nanoseconds else None
