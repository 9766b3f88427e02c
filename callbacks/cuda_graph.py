"""`CUDAGraphStep`: forward and backward of a training step as a CUDA graph, and nothing else changes."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from .graph_device import CudaGraphs, SoftwareGraphs
from .graph_runner import StepRunner


class CUDAGraphStep(Callback):
    """Captures the forward and backward of a training step once and replays them, without Python.

    Args:
        warmup: eager steps before a capture.
        max_graphs: how many shapes of batches are captured; others run eagerly.
        strict: a step that cannot be captured is an error; else training goes on eagerly, with a warning that says why.
        software: without CUDA use a slow software graph, instead of nothing: for tests.
    """

    _runner: StepRunner | None = None

    def __init__(self, *, warmup: int = 3, max_graphs: int = 4, strict: bool = False, software: bool = False) -> None:
        if warmup < 2:
            raise ValueError(f"warmup: expected at least 2 steps, which are compared, got {warmup}")
        if max_graphs < 1:
            raise ValueError(f"max_graphs: expected at least 1, got {max_graphs}")
        self.warmup, self.max_graphs, self.strict, self.software = warmup, max_graphs, strict, software

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        if device.type != "cuda" and not self.software:
            rank_zero_info(f"CUDAGraphStep: there are no CUDA graphs on {device.type}; steps run eagerly")
            return
        graphs = CudaGraphs(device) if device.type == "cuda" else SoftwareGraphs()
        self._runner = StepRunner(trainer, pl_module, graphs, self.warmup, self.max_graphs, self.strict)
        self._runner.install()

    def _remove(self) -> None:
        if self._runner is not None:
            self._runner.remove()
        self._runner = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    def __getstate__(self) -> dict[str, Any]:
        """A launcher may pickle the callback; graphs stay in their process."""
        return {**self.__dict__, "_runner": None}
