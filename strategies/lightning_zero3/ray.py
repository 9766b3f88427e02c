"""For Ray Train: a strategy that `prepare_trainer` takes, and checkpoints in the run's storage.

    from lightning_zero3.ray import RayReport, RayZero3Strategy, latest_checkpoint

Only who imports this module needs Ray (2.51 or newer); nothing else of the package knows of it.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment
from ray.train.torch import get_device
from typing_extensions import override

from .strategies import Zero3Strategy

_FILE = "checkpoint.ckpt"


class RayZero3Strategy(Zero3Strategy):
    """``"zero3"`` with the layout and the device that Ray gives to a worker.

    Args:
        options: those of :class:`~lightning_zero3.Zero3Strategy`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cluster_environment": RayLightningEnvironment(), **options})

    @property
    @override
    def root_device(self) -> torch.device:
        return get_device()


# `ray.train.lightning.prepare_trainer` asks for a subclass of Ray's own strategies. A registered
# one inherits nothing of `ddp`.
RayDDPStrategy.register(RayZero3Strategy)


class RayReport(pl.Callback):
    """Saves a checkpoint of all ranks into the run's storage, and reports it on every rank.

    All ranks write the same checkpoint, so ``RunConfig(storage_path=...)`` is a folder that all
    hosts see. ``CheckpointConfig(num_to_keep=...)`` decides how many stay.

    Args:
        every_n_train_steps: after how many optimizer steps; by default at the end of every epoch.

    Raises:
        ValueError: when training begins: the storage is no folder, but an object store.
    """

    def __init__(self, every_n_train_steps: int | None = None) -> None:
        self._every_n_train_steps, self._last_step = every_n_train_steps, 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._last_step = trainer.global_step
        storage = ray.train.get_context().get_storage()
        if storage.storage_filesystem.type_name != "local":
            raise ValueError(
                f"RayReport: RunConfig(storage_path=...) is {storage.experiment_fs_path} of a"
                f" {storage.storage_filesystem.type_name} file system.\nGive a folder that all"
                " hosts see: each rank writes its part of a checkpoint there."
            )

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        steps, step = self._every_n_train_steps, trainer.global_step
        if steps is not None and step % steps == 0 and step != self._last_step:
            self._report(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._every_n_train_steps is None:
            self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        self._last_step = step = trainer.global_step
        storage = ray.train.get_context().get_storage()
        folder = f"{storage.experiment_fs_path}/checkpoint_{step:09}"
        trainer.save_checkpoint(f"{folder}/{_FILE}")
        if isinstance(trainer.strategy, Zero3Strategy):
            trainer.strategy.finish_saving()  # in the background, perhaps
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        ray.train.report(
            {**metrics, "epoch": trainer.current_epoch, "step": step},
            checkpoint=ray.train.Checkpoint(folder, storage.storage_filesystem),
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )


def latest_checkpoint() -> str | None:
    """Return the path to resume from, ``Trainer.fit(..., ckpt_path=...)``, or None to begin anew.

    It is the last checkpoint that :class:`RayReport` has reported, in this run before a restart or
    in the one that ``TorchTrainer`` goes on with.
    """
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else f"{checkpoint.path}/{_FILE}"
