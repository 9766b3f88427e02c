"""Checks of trainer, strategy and allocator for what rules out a capture."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.nn.parallel import DistributedDataParallel

from .eager_run import REMEDY
from .fingerprint import names_read

_OPTIONS_OF_ZERO3 = {
    "debug": "looks at values on the host.",
    "reduce_once": "exchanges something else in each micro-batch of a window. Leave it out.",
}


class GraphCaptureError(RuntimeError):
    """With ``strict``, something cannot be captured, or is not what the eager step computes."""


def check_trainer(trainer: Trainer, module: LightningModule) -> list[str]:
    """Return the problems of a captured step that are known before the first step."""
    found, model = check_device(trainer), trainer.strategy.model
    if isinstance(model, DistributedDataParallel) and model.gradient_as_bucket_view:
        found.append(
            "`DDPStrategy(gradient_as_bucket_view=True)` makes DDP replace the gradients that a"
            " graph adds to. Leave it out."
        )
    if isinstance(model, DistributedDataParallel) and model._comm_hooks:
        name = getattr(model._comm_hooks[0][0], "__qualname__", "a hook")
        found.append(
            f"`DDPStrategy(ddp_comm_hook=...)`, {name}, is Python, which would run only once. Leave"
            " it out."
        )
    if not module.automatic_optimization:
        found.append(
            "The module optimizes manually: its `training_step` runs backward and the optimizer"
            " itself."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        found.append("`training_step(self, dataloader_iter)` fetches batches itself. Take a batch.")
    if used := names_read(module, "training_step") & {"logger", "loggers"}:
        found.append(
            f"`training_step` mentions `{min(used)}`, and a graph would use it only once, at its"
            f" capture. Use `self.log`. {REMEDY}"
        )
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
        found.append("LBFGS runs a step several times; how often depends on values.")
    if trainer._detect_anomaly:
        found.append("`Trainer(detect_anomaly=True)` looks at values on the host.")
    return found


def check_device(trainer: Trainer) -> list[str]:
    """Return the problems of any capture in this run, of a step or of a module."""
    strategy, found = trainer.strategy, []
    if (
        not isinstance(strategy, SingleDeviceStrategy | DDPStrategy)
        and getattr(strategy, "strategy_name", "") != "zero3"
    ):
        found.append(
            f"The strategy {type(strategy).__name__} is not known to work. Use one device, `ddp` or"
            " `zero3`."
        )
    for option, why in _OPTIONS_OF_ZERO3.items():
        if getattr(strategy, f"_{option}", False):
            found.append(f"`Zero3Strategy({option}=True)` {why}")
    settings = (
        os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
    )
    device, fraction = strategy.root_device, 1.0
    if device.type == "cuda" and "garbage_collection_threshold" in settings:
        fraction = torch.cuda.memory.get_per_process_memory_fraction(device)
    return found + check_allocator(settings, trainer.world_size, os.environ, fraction)


def check_strategy_of_modules(trainer: Trainer) -> list[str]:
    """Return the problems of captures of single modules."""
    if getattr(trainer.strategy, "_stop_on_nonfinite", False):
        return [
            "`Zero3Strategy(stop_on_nonfinite=True)` looks at what units inside of modules compute."
        ]
    return []


def check_allocator(
    settings: str, world_size: int, environ: Mapping[str, str], fraction: float = 1.0
) -> list[str]:
    """Return why settings of the CUDA allocator rule out graphs.

    Args:
        settings: the value of PYTORCH_CUDA_ALLOC_CONF.
        world_size: number of ranks.
        environ: environment variables of the process.
        fraction: share of the device's memory that the process may use, as set in the process.
    """
    found = []
    configured = re.search(r"per_process_memory_fraction:([0-9]*\.?[0-9]+)", settings)
    # The CUDA allocator collects garbage only under a limit.
    is_limited = min(fraction, float(configured[1]) if configured else 1.0) < 1
    if "garbage_collection_threshold" in settings and is_limited:
        found.append(
            "The allocator's garbage_collection_threshold frees unused memory when more is asked"
            " for, in a capture too, which ends it with an error. Unset it, or"
            " per_process_memory_fraction."
        )
    if (
        "expandable_segments:True" in settings
        and world_size > 1
        and environ.get("NCCL_GRAPH_REGISTER") != "0"
    ):
        found.append(
            "NCCL registers the memory of graphs, which hangs with expandable_segments. Set"
            " NCCL_GRAPH_REGISTER=0."
        )
    return found
