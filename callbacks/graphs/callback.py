"""`CUDAGraphStep` runs the forward and backward of a training step as CUDA graphs."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from .device import CudaGraphs, SoftwareGraphs
from .module_runner import ModulesRunner
from .step_runner import StepRunner


class CUDAGraphStep(Callback):
    """Captures the forward and backward of training as CUDA graphs and replays them.

    A replay runs no Python. Losses, logged values, outputs, gradients, hooks, counters, random
    numbers and checkpoints are bit by bit those of a run without this callback (but for the sign of
    zeros in gradients). The rest of Lightning's loop runs as ever: clipping, loss scaling, the
    optimizer, schedulers and validation. It helps models whose layers are so small that Python is
    slower than the GPU.

    **Eager steps.** The first `warmup` batches of a shape run eagerly and are watched. After that
    the first batch of each shape in each epoch does, so a shape that comes once an epoch, such as a
    ragged last batch, is never captured. If the step does anything that a replay would not repeat,
    the callback names the reason and the line, and training goes on eagerly. A replay does not
    repeat a wait for a value, a Python number or an outside tensor that differs from step to step,
    logging of or writing to tensors on the host, an update of a metric, printing, or state kept in
    Python. Some uses of `batch_idx` are not seen: as the index of a list, as the end of a `range`,
    or on the right of a float (`batch_idx > 1e3` is seen, `1e3 < batch_idx` is not).

    **Changes.** Before each replay the callback compares all that the step reads: weights, buffers,
    hooks and modes; attributes of modules that the step mentions, containers and settings objects
    included; globals; numbers of the optimizer, where the step mentions them; settings of torch. A
    value of no module and no global that changes within an epoch (a number in a function's closure,
    or in an attribute of the trainer) is found at the next epoch's first step of each shape, which
    runs eagerly and is compared. Each change that is found leads to a new capture. State in objects
    that Python cannot look into, or that has no name in the step (an `array`, `itertools.count`,
    `ctypes`), is not seen.

    **Hooks and gradients.** Forward hooks may compute with tensors; everything else in them happens
    only in eager steps. On a single device and with `ddp`, gradients lie in the same memory in all
    steps: to keep a gradient beyond a step, copy it; `parameter.grad` itself is overwritten.

    **Strategies.** The callback works on a single device; with `zero3`, whose all-gathers and
    reductions are captured too; and with `ddp` if every parameter is used, without
    `gradient_as_bucket_view` and communication hooks. Ranks decide together, by one small exchange
    between hosts for each micro-batch: a step, an optimizer's update or a module that one rank
    cannot capture runs eagerly on all. With NCCL, `ddp` runs eleven steps before a capture. It is
    tested with the software graph, and on one rank on an H100.

    Args:
        warmup: eager steps before the capture of a shape, at least 2.
        max_graphs: number of batch shapes that are captured; batches of other shapes run eagerly.
            With `ddp` the first, the last and the other micro-batches of an accumulation window
            exchange different things, and so does the first one after a validation: each of these
            counts as a shape.
        strict: raise an error on all ranks where something cannot be captured.
        optimizer: capture the optimizer's update too, in a graph of its own. The optimizer must be
            made with ``capturable=True`` (or ``fused=True``, where it has no such option) and a
            tensor as learning rate, which schedulers change as ever. Clipping, loss scaling and
            schedulers run eagerly.
        modules: capture only these modules, by patterns of their names
            (``["encoder", "blocks.*"]``), for a model whose step cannot be captured as a whole. The
            rest of the step is free, manual optimization included. If a module runs several times
            before a backward, its first run is replayed. Which of its outputs get gradients may
            change at the start of an epoch; within an epoch a change is an error. With `zero3` on
            several ranks, name modules that are units, or inside of one. Such modules exchange
            nothing inside, so each rank captures the shapes of its own inputs. A module that cannot
            be captured is reported before the next micro-batch.
        software: on a machine without CUDA, replay a slow software graph (for tests and examples)
            instead of training eagerly.

    Raises:
        GraphCaptureError: with `strict`, something cannot be captured.
    """

    _runner: StepRunner | ModulesRunner | None = None
    # Set when training ends, for callbacks whose `on_train_end` runs after this one's.
    _input_nbytes = 0

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
        self.warmup, self.max_graphs = warmup, max_graphs
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
            self._runner.agree_on_refusals()

    @property
    def graph_input_nbytes(self) -> int:
        """Bytes of the fixed memory that graphs read their inputs from.

        The value stays until `on_train_end` is over for all callbacks.
        """
        return self._input_nbytes if self._runner is None else self._runner.input_nbytes

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes that graphs use: "pool" (reserved), "inputs" and "gradients".

        "gradients" counts the parameters' own gradients. All are 0 unless training runs.
        """
        if self._runner is None:
            return {"pool": 0, "inputs": 0, "gradients": 0}
        return self._runner.memory_bytes()

    def _uninstall(self) -> None:
        if self._runner is not None:
            self._runner.uninstall()
        self._runner, self._input_nbytes = None, 0

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(self._runner, ModulesRunner):
            self._runner.agree_on_refusals()
        if self._runner is not None:
            rank_zero_info(self._runner.summary())
            nbytes = self._runner.input_nbytes
            self._uninstall()
            self._input_nbytes = nbytes

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._uninstall()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._uninstall()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without graphs, which belong to one process.

        A launcher of Lightning (`_MultiProcessingLauncher`) may pickle the callback.
        """
        return {**self.__dict__, "_runner": None, "_input_nbytes": 0}
