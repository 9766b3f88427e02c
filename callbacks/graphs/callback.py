"""`CUDAGraphStep`: forward and backward of a training step as a CUDA graph, and nothing else
changes.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from .device import CudaGraphs, SoftwareGraphs
from .module_runner import ModulesRunner
from .step_runner import StepRunner


class CUDAGraphStep(Callback):
    """Runs the forward and backward of training as CUDA graphs: captured once, then replayed
    without Python.

    Losses, logged values, outputs, gradients, hooks, counters, random numbers and checkpoints are
    those of the run without it, bit by bit (but for the sign of zeros in gradients). The rest of
    Lightning's loop runs as ever: clipping, loss scaling, the optimizer, schedulers, validation. It
    is for models whose layers are so small that Python is slower than the GPU.

    The first `warmup` batches of a shape run eagerly and are watched, and then the first in each
    epoch (so one that comes once an epoch, as a ragged last batch, is never captured). If the step
    does anything that a replay would not repeat (waits for a value, computes with a Python number
    or a tensor of outside that is another one each time, logs or writes to tensors on the host,
    updates a metric, prints, keeps state in Python), the reason and the line are named, and
    training goes on eagerly (of `batch_idx` it is not seen that it is an index of a list, the end
    of a `range` or on the right of a float: `batch_idx > 1e3` is seen, `1e3 < batch_idx` is not).
    What the step reads is compared before each replay: weights, buffers, hooks and modes;
    attributes of modules that it mentions, whatever they hold (containers and settings objects,
    too); globals; numbers of the optimizer, where it mentions them; settings of torch. What belongs
    to no module, is no global and changes within an epoch (a number that a function has in a
    closure, or the trainer in an attribute) is found at the next epoch's first step of each shape,
    which runs eagerly and is compared. Whatever is found leads to a new capture. State in objects
    that Python cannot look into or that has no name in the step (an `array`, `itertools.count`,
    `ctypes`) is not seen.

    Forward hooks may compute with tensors; what else they do happens only in eager steps. Gradients
    lie in the same memory in all steps on a single device and with `ddp`: keep a copy, not
    `parameter.grad` itself, beyond a step.

    Works on a single device, with `zero3`, whose gathers and reductions are captured too, and with
    `ddp` where every parameter is used, without `gradient_as_bucket_view` and hooks of
    communication. Ranks decide together, by one small exchange of the hosts for each micro-batch:
    what one of them cannot capture, the step, the optimizer's update or a module, runs eagerly on
    all. With NCCL, `ddp` runs eleven steps before a capture. Tested with the software graph, and on
    one rank on an H100.

    Args:
        warmup: eager steps before the capture of a shape, at least 2.
        max_graphs: shapes of batches that are captured; batches of other shapes run eagerly. With
            `ddp` the first, the last and other micro-batches of a window of accumulation exchange
            something else, and the first one after a validation: each of these counts as a shape.
        strict: what cannot be captured is an error, on all ranks.
        optimizer: capture the optimizer's update too, in a graph of its own. It must be made with
            ``capturable=True`` (or ``fused=True``, where it has no such option) and a tensor as
            learning rate, which schedulers change as ever. Clipping, loss scaling and schedulers
            run eagerly.
        modules: capture only these modules, by patterns of their names
            (``["encoder", "blocks.*"]``), for a model whose step cannot be captured as a whole.
            Everything else may be as it likes, manual optimization included. Of a module that runs
            several times before a backward, the first run is replayed. Which of its outputs get
            gradients may change at the start of an epoch; within an epoch that is an error. With
            `zero3` on several ranks, modules that are units, or inside of one. They exchange
            nothing inside, so each rank captures the shapes of its own inputs. A module that cannot
            be captured is reported before the next micro-batch.
        software: where there is no CUDA, replay a slow software graph (for tests and examples),
            instead of training eagerly.

    Raises:
        GraphCaptureError: with `strict`, something cannot be captured.
    """

    _runner: StepRunner | ModulesRunner | None = None
    _input_nbytes = 0  # when training ended, for callbacks that are told so after this one

    def __init__(
        self,
        *,
        warmup: int = 3,
        max_graphs: int = 4,
        strict: bool = False,
        optimizer: bool = False,
        modules: list[str] | None = None,
        software: bool = False,
    ) -> None:
        if warmup < 2:
            raise ValueError(f"warmup: expected at least 2 steps, which are compared, got {warmup}")
        if max_graphs < 1:
            raise ValueError(f"max_graphs: expected at least 1, got {max_graphs}")
        self.warmup, self.max_graphs, self.strict, self.software = (
            warmup,
            max_graphs,
            strict,
            software,
        )
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
                f"CUDAGraphStep: no CUDA graphs on {device.type}; steps run eagerly"
                " (`software=True` tries it out)"
            )
            return
        engine = getattr(trainer.strategy, "engine", None)
        software = SoftwareGraphs(None if engine is None else engine.collectives)
        graphs = CudaGraphs(device) if device.type == "cuda" else software
        limits = self.warmup, self.max_graphs, self.strict
        if self.modules is None:
            self._runner = StepRunner(trainer, pl_module, graphs, *limits, self.optimizer)
        else:
            self._runner = ModulesRunner(trainer, pl_module, graphs, self.modules, *limits)
        self._runner.install()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(self._runner, ModulesRunner):
            self._runner.agree()

    @property
    def graph_input_nbytes(self) -> int:
        """Bytes at the fixed addresses that graphs read their inputs from, for all callbacks until
        `on_train_end` is over.
        """
        return self._input_nbytes if self._runner is None else self._runner.input_nbytes

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that graphs hold while training runs: "pool" (reserved), "inputs" and "gradients"
        (the parameters' own).
        """
        if self._runner is None:
            return {"pool": 0, "inputs": 0, "gradients": 0}
        return self._runner.memory_bytes()

    def _remove(self) -> None:
        if self._runner is not None:
            self._runner.remove()
        self._runner, self._input_nbytes = None, 0

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(self._runner, ModulesRunner):
            self._runner.agree()
        if self._runner is not None:
            rank_zero_info(self._runner.summary())
            held = self._runner.input_nbytes
            self._remove()
            self._input_nbytes = held

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._remove()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._remove()

    def __getstate__(self) -> dict[str, Any]:
        """A launcher may pickle the callback; graphs stay in their process."""
        return {**self.__dict__, "_runner": None, "_input_nbytes": 0}
