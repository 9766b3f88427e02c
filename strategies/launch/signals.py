"""SIGTERM, and SIGUSR1 in SLURM: all ranks stop, or save and requeue, after the same batch.

Lightning's own handlers broadcast and save wherever the signal finds a process, which is another
place on every rank: in a gather on one, in the optimizer step of another. Here a handler only notes
the signal. The ranks compare notes after every batch, and act on them together.
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
_ONE_REQUEST_S = 10.0  # SLURM signals every process of a job, within moments


class AgreedSignals(_SignalConnector):
    """The Trainer's signal connector, with handlers that only take note."""

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        self._stop = self._requeue = False  # asked of this process, or of another and not done yet
        self._requeued_at = -_ONE_REQUEST_S
        self._notes = _Notes()

    @classmethod
    def take_over(cls, trainer: pl.Trainer) -> AgreedSignals:
        """Put one in the place of the Trainer's own; the same one at every further fit."""
        found = trainer._signal_connector
        if not isinstance(found, cls):
            found = trainer._signal_connector = cls(trainer)
            trainer.callbacks.append(_AfterBatch(found))
        # Lightning's broadcast before every batch, which waits for the device, has nothing left to
        # say.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing
        return found

    @override
    def register_signal_handlers(self) -> None:
        self._stop = self._requeue = False
        self._notes = _Notes()
        super().register_signal_handlers()

    @override
    def _sigterm_notifier_fn(self, signum: int, frame: FrameType | None) -> None:
        launcher = self.trainer.strategy.launcher
        if not self._stop and launcher is not None:
            launcher.kill(signum)
        self._stop = True

    @override
    def _slurm_sigusr_handler_fn(self, signum: int, frame: FrameType | None) -> None:
        self._requeue |= time.monotonic() - self._requeued_at > _ONE_REQUEST_S

    def between_batches(self) -> None:
        """Do what any rank was asked for before the last call; to be called by all ranks.

        Raises:
            SIGTERMException: a rank got SIGTERM.
        """
        stop, requeue = self._notes.compare(
            self._stop, self._requeue, self.trainer.strategy.root_device
        )
        self._stop, self._requeue = self._stop or stop, self._requeue or requeue
        if (
            self.trainer.state.fn == TrainerFn.FITTING
            and self.trainer.fit_loop._should_accumulate()
        ):
            return  # gradients that wait for more batches are in no checkpoint
        if requeue and self.trainer.training:
            super()._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # saves and requeues
            self._requeue, self._requeued_at, self._notes = False, time.monotonic(), _Notes()
        if stop:
            self.received_sigterm = True
            rank_zero_info("Stopping after SIGTERM.")
            raise SIGTERMException


class _AfterBatch(Callback):
    """At the place where ModelCheckpoint saves too."""

    def __init__(self, signals: AgreedSignals) -> None:
        self._signals = signals

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._signals.between_batches()


class _Notes:
    """The ranks' notes, compared in the background: a call returns what the one before has
    found.
    """

    def __init__(self) -> None:
        self._ready: Any = None  # a work of gloo's, or an event
        self._found: Tensor | None = None  # on the host, once it is ready
        self._free: Tensor | None = None
        self._on_device: Tensor | None = None

    def compare(self, stop: bool, requeue: bool, device: torch.device) -> tuple[bool, bool]:
        """Whether any rank was asked to stop, or to requeue, at the call before; collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return stop, requeue
        found, ready = self._found, self._ready
        mine, self._free = self._free, found  # two take turns: the last one is still under way
        if mine is None:
            mine = torch.empty(2, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu")
        mine[0], mine[1] = stop, requeue
        self._found = mine
        self._ready = (
            self._send(mine, device)
            if device.type != "cpu"
            else dist.all_reduce(mine, _ANY, async_op=True)
        )
        if found is None:
            return False, False
        ready.wait() if device.type == "cpu" else ready.synchronize()
        return bool(found[0]), bool(found[1])

    def _send(self, mine: Tensor, device: torch.device) -> torch.Event:
        if self._on_device is None:
            self._on_device = torch.empty_like(mine, device=device)
        # All on the current stream, so that the host waits for the batch before, never for this
        # one.
        self._on_device.copy_(mine, non_blocking=True)
        dist.all_reduce(self._on_device, _ANY)
        mine.copy_(self._on_device, non_blocking=True)
        event = torch.Event(device)
        event.record()
        return event


def _nothing() -> None:
    pass
