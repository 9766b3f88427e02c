"""What libraries beside Lightning's callbacks need to know of a sharded model."""

from __future__ import annotations

from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import nn


def mark_sharded(module: nn.Module) -> None:
    """Tell the models of transformers in ``module`` that they are sharded.

    They then run a layer that LayerDrop leaves out, without using what it computes, and
    ``generate`` runs on until all ranks have ended their texts.
    """
    for child in module.modules():
        if any(base.__module__.startswith("transformers.") for base in type(child).__mro__):
            for part in child.modules():
                part._is_fsdp_managed_module = True  # type: ignore[assignment]  # a flag of theirs


def log_graphs(loggers: Sequence[Logger], module: pl.LightningModule) -> None:
    """Let loggers trace ``module`` while it is whole, instead of later on rank 0 alone."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_graph(module)
            logger._log_graph = False
