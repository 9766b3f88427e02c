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
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from ..collectives import Meeting

# SLURM signals every process of a job within moments: signals so close are one request.
_ONE_REQUEST_S = 10.0


class AgreedSignals(_SignalConnector):
    """The Trainer's signal connector, with handlers that only set flags."""

    def __init__(self, trainer: pl.Trainer) -> None:
        super().__init__(trainer)
        # requests to this process that are not done yet
        self._needs_stop = self._needs_requeue = False
        self._requeued_at = -_ONE_REQUEST_S

    @classmethod
    def take_over(cls, trainer: pl.Trainer) -> AgreedSignals:
        """Replace the Trainer's signal connector; return the replacement, one for all its runs."""
        connector = trainer._signal_connector
        if not isinstance(connector, cls):
            connector = trainer._signal_connector = cls(trainer)
        # A program may set them anew between two runs. (Lightning does not declare them.)
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, _AfterBatch) for callback in callbacks):
            callbacks.append(_AfterBatch())
        # Lightning's `_TrainingEpochLoop` broadcasts its SIGTERM flag before every batch and waits
        # for the device. The ranks have compared that flag here already.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _do_nothing  # type: ignore[method-assign]
        return connector

    @override
    def register_signal_handlers(self) -> None:
        self._needs_stop = self._needs_requeue = False
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
        """Stop, or save and requeue, if any rank has got a signal. Collective.

        Raises:
            SIGTERMException: a rank got SIGTERM.
        """
        # Each rank keeps its own flags until all act: it may get a signal at any moment.
        flags = [self._needs_stop, self._needs_requeue]
        votes = torch.tensor(flags, dtype=torch.int64, device="cpu")
        strategy: Any = self.trainer.strategy
        stop, requeue = strategy._communicator.agree(votes, Meeting.BATCH).tolist()
        if (
            self.trainer.state.fn == TrainerFn.FITTING
            and self.trainer.fit_loop._should_accumulate()
        ):
            return  # no checkpoint has the gradients that wait for more batches
        if requeue and self.trainer.training:
            # saves and requeues; it does not use the frame
            super()._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]
            self._needs_requeue, self._requeued_at = False, time.monotonic()
        if stop:
            self.received_sigterm = True
            rank_zero_info("Stopping after SIGTERM.")
            raise SIGTERMException


class _AfterBatch(Callback):
    """Calls :meth:`AgreedSignals.between_batches` in the hook in which ModelCheckpoint saves."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        connector = trainer._signal_connector
        assert isinstance(connector, AgreedSignals)
        connector.between_batches()


def _do_nothing() -> None:
    pass
