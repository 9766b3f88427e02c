"""SIGTERM, and SIGUSR1 in SLURM: all ranks stop, or save and requeue, after the same batch.

The handlers of Lightning's ``_SignalConnector`` broadcast and save wherever the signal finds a
process, which is another place on every rank: in a gather on one, in the optimizer step of another.
Here a handler only sets a flag. The ranks compare flags after every batch, and act together.
"""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

_ANY = dist.ReduceOp.MAX
# SLURM signals every process of a job within moments: signals so close are one request.
_ONE_REQUEST_S = 10.0


class AgreedSignals(_SignalConnector):
    """The Trainer's signal connector, with handlers that only set flags."""

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        # requests to this process, or to another one, that are not done yet
        self._needs_stop = self._needs_requeue = False
        self._requeued_at = -_ONE_REQUEST_S
        self._notes = _Notes()

    @classmethod
    def take_over(cls, trainer: pl.Trainer) -> AgreedSignals:
        """Replace the Trainer's signal connector; return the replacement, one for all its runs."""
        connector = trainer._signal_connector
        if not isinstance(connector, cls):
            connector = trainer._signal_connector = cls(trainer)
            # Lightning does not declare it
            trainer.callbacks.append(_AfterBatch(connector))  # type: ignore[attr-defined]
        # Lightning's `_TrainingEpochLoop` broadcasts its SIGTERM flag before every batch and waits
        # for the device. The ranks have compared that flag here already.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing  # type: ignore[method-assign]
        return connector

    @override
    def register_signal_handlers(self) -> None:
        self._needs_stop = self._needs_requeue = False
        self._notes = _Notes()
        super().register_signal_handlers()

    @override
    def _sigterm_notifier_fn(self, signum: int, frame: FrameType | None) -> None:
        launcher = self.trainer.strategy.launcher
        if not self._needs_stop and launcher is not None:
            launcher.kill(signum)
        self._needs_stop = True

    @override
    def _slurm_sigusr_handler_fn(self, signum: int, frame: FrameType | None) -> None:
        self._needs_requeue |= time.monotonic() - self._requeued_at > _ONE_REQUEST_S

    def between_batches(self) -> None:
        """Stop, or save and requeue, if any rank had got a signal at the last call. Collective.

        Raises:
            SIGTERMException: a rank got SIGTERM.
        """
        stop, requeue = self._notes.compare(
            self._needs_stop, self._needs_requeue, self.trainer.strategy.root_device
        )
        self._needs_stop |= stop
        self._needs_requeue |= requeue
        if (
            self.trainer.state.fn == TrainerFn.FITTING
            and self.trainer.fit_loop._should_accumulate()
        ):
            return  # no checkpoint has the gradients that wait for more batches
        if requeue and self.trainer.training:
            # saves and requeues; it does not use the frame
            super()._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]
            self._needs_requeue, self._requeued_at = False, time.monotonic()
            self._notes = _Notes()
        if stop:
            self.received_sigterm = True
            rank_zero_info("Stopping after SIGTERM.")
            raise SIGTERMException


class _AfterBatch(Callback):
    """Calls :meth:`AgreedSignals.between_batches` in the hook in which ModelCheckpoint saves."""

    def __init__(self, signals: AgreedSignals) -> None:
        self._signals = signals

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._signals.between_batches()


class _Notes:
    """The flags of all ranks, reduced in the background: a call returns the last call's result."""

    def __init__(self) -> None:
        self._work: Any = None  # of the last call: gloo's work, or a device event
        self._result: Tensor | None = None  # [2, int32] on the host, valid when the work is done
        self._spare: Tensor | None = None  # [2, int32] on the host
        self._on_device: Tensor | None = None

    def compare(self, stop: bool, requeue: bool, device: torch.device) -> tuple[bool, bool]:
        """Return whether any rank had to stop, or to requeue, at the last call. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return stop, requeue
        last_result, last_work = self._result, self._work
        # hazard: the last call's reduction may still write to its tensor, so two take turns
        flags, self._spare = self._spare, last_result
        if flags is None:
            flags = torch.empty(
                2, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu"
            )
        flags[0], flags[1] = stop, requeue
        self._result = flags
        self._work = (
            self._reduce(flags, device)
            if device.type != "cpu"
            else dist.all_reduce(flags, _ANY, async_op=True)
        )
        if last_result is None:
            return False, False
        last_work.wait() if device.type == "cpu" else last_work.synchronize()
        return bool(last_result[0]), bool(last_result[1])

    def _reduce(self, flags: Tensor, device: torch.device) -> torch.Event:
        """Begin to reduce ``flags`` over ranks on ``device``; return the event of the end."""
        if self._on_device is None:
            self._on_device = torch.empty_like(flags, device=device)
        # All of it runs on the current stream, so that the next call waits until the device has
        # ended this batch, and never for the batch of that call.
        self._on_device.copy_(flags, non_blocking=True)
        dist.all_reduce(self._on_device, _ANY)
        flags.copy_(self._on_device, non_blocking=True)
        event = torch.Event(device)
        event.record()
        return event


def _do_nothing() -> None:
    pass
