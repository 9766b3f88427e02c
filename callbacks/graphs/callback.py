"""`CUDAGraphStep` runs the forward and backward of a training step as CUDA graphs."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from .device import CudaGraphs, SoftwareGraphs
from .runner import Runner


class CUDAGraphStep(Callback):
    """Captures the forward and backward of training as CUDA graphs and replays them.

    A replay runs no Python, and is one node of autograd's graph. Losses, logged values, outputs,
    gradients, hooks, counters, random numbers and checkpoints are bit by bit those of a run without
    this callback (but for the sign of zeros in gradients). The rest of Lightning's loop runs as
    ever. It helps models whose layers are so small that Python is slower than the GPU.

    **Capture, then compare.** The first `warmup` micro-batches of a shape run eagerly, the next one
    is captured. The `verify` after it, and the first of each shape in each epoch, run eagerly, with
    a replay beside them from the same random states; training goes on with the eager numbers. The
    first difference is named, and the step runs eagerly from there on. So does a step that does
    what a replay would leave undone. Another layer, mode or number that the step computes with
    leads to a new capture. The how-to "CUDA graphs" says what is refused, what leads to a new
    capture, what is seen late or not at all, and what memory the comparison takes.

    It works on a single device, with `zero3`, whose exchanges are captured too, and with `ddp`,
    which reduces the gradients after a replay. What one rank cannot capture runs eagerly on all.

    Args:
        warmup: eager steps before the capture of a shape, at least 2.
        verify: replays of a shape after its capture that are compared with eager steps.
        max_graphs: number of batch shapes that are captured; batches of other shapes run eagerly.
        strict: raise an error on all ranks where something cannot be captured, or differs. Without
            CUDA steps run eagerly all the same.
        optimizer: capture the optimizer's update too, in a graph of its own. The optimizer must be
            made with ``capturable=True`` (or ``fused=True``, where it has no such option). A
            learning rate that changes must be a tensor on the device. A fused optimizer that takes
            the loss scale of 16-mixed is left eager.
        modules: capture only these modules, by patterns of their names
            (``["encoder", "blocks.*"]``), for a model whose step cannot be captured as a whole. The
            rest of the step is free, manual optimization included. If a module runs several times
            before a backward, its first run is replayed. Other outputs that get gradients than in
            its eager runs are an error, and so are a second backward and a weight that is written
            before the backward. `zero3` on several ranks is refused.
        software: on a machine without CUDA, replay a slow software graph (for tests and examples)
            instead of training eagerly.

    Raises:
        GraphCaptureError: with `strict`, something cannot be captured, or differs.
    """

    _runner: Runner | None = None
    # Bytes of the fixed memory that graphs read their inputs from, until a fit is over.
    graph_input_nbytes = 0

    def __init__(
        self,
        *,
        warmup: int = 3,
        verify: int = 3,
        max_graphs: int = 4,
        strict: bool = False,
        optimizer: bool = False,
        modules: list[str] | None = None,
        software: bool = False,
    ) -> None:
        least_values = {"warmup": (warmup, 2), "verify": (verify, 1), "max_graphs": (max_graphs, 1)}
        for name, (value, least) in least_values.items():
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        self.warmup, self.verify, self.max_graphs = warmup, verify, max_graphs
        self.strict, self.software = strict, software
        if modules is not None and (optimizer or not modules):
            raise ValueError(
                "modules: expected names of modules, and no `optimizer=True` beside them, which is"
                " for whole steps"
            )
        self.optimizer, self.modules = optimizer, modules

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        device = trainer.strategy.root_device
        if device.type != "cuda" and not self.software:
            rank_zero_info(
                f"CUDAGraphStep: no CUDA graphs on {device.type}: steps run eagerly"
                " (or `software=True`)"
            )
            return
        engine = getattr(trainer.strategy, "engine", None)
        graphs = CudaGraphs(device) if device.type == "cuda" else SoftwareGraphs(engine)
        self._runner = Runner(trainer, graphs, self)
        self._runner.install()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._runner is not None and self._runner.step is None:
            self._runner.agree()

    def _uninstall(self) -> None:
        if self._runner is not None:
            self._runner.uninstall()
            self._runner = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._runner is not None:
            self._runner.agree()
            rank_zero_info(self._runner.summary())
            nbytes = self.graph_input_nbytes
            self._uninstall()
            self.graph_input_nbytes = nbytes  # a later callback may ask at this end, too

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._uninstall()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._uninstall()
        self.graph_input_nbytes = 0
