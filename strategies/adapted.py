"""Callbacks of Lightning that reach for weights or param groups themselves, made to work on shards.

The class of such a callback is switched to a subclass that goes through the strategy; for Lightning and in checkpoints it
keeps its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from typing_extensions import override


class _Finetuning(BaseFinetuning):
    """Looks the parameters of param groups up in the module, and adds some."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with trainer.strategy.param_groups():
            super().on_fit_start(trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with trainer.strategy.param_groups():
            super().on_train_epoch_start(trainer, pl_module)


_ADAPTED: dict[type[Callback], type] = {BaseFinetuning: _Finetuning}


def adapt(callbacks: Sequence[Callback]) -> None:
    """Switch the classes of those callbacks that need it."""
    for callback in callbacks:
        cls: Any = type(callback)
        for base, adapted in _ADAPTED.items():
            if isinstance(callback, base) and not isinstance(callback, adapted):
                names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}  # `state_key` is made of it
                callback.__class__ = type(cls.__name__, (adapted, cls), names)
