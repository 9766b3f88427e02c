"""The Lightning strategy: each Trainer hook is a few calls of the engine."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from inspect import signature
from typing import Any, TypeVar, get_args

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import Never, override

from .activations import Activations, ActivationsKind, parse_activations
from .adapters.foreign import log_graphs, mark_sharded
from .adapters.lightning_callbacks import adapt, move_averages, start_averages
from .adapters.option_names import refuse_others
from .checked_units import CheckedUnit
from .checkpoints import CheckpointOptions, CheckpointStrategy
from .collectives import LocalCollectives
from .communicators import make_collectives, make_hybrid_collectives
from .data import DataHooks, DataOptions
from .engine import (
    Offload,
    OffloadKind,
    OptimizerStep,
    Unit,
    UnitPolicy,
    Zero3Engine,
    gathered,
)
from .evaluation.strategy import EvaluationStrategy
from .evaluation.torchmetrics import prepare_metrics
from .initial_values import Initializer
from .launch.process_strategy import StartMethod
from .liveness.watchdog import WatchOptions
from .memory_ledger import by_category, by_unit
from .numerics.nonfinite import FiniteCheck
from .numerics.precision import (
    WireDtype,
    convert,
    gather_dtypes,
    kept_names,
    wire_dtype,
)
from .optimizers.host_steps import FUSED
from .optimizers.param_groups import ParamGroups
from .plan import PLAN, count_state, show_plan, size_text
from .state_dicts.optimizer_state import broadcast_created_state
from .support import parse_size

_START_METHODS: dict[str, StartMethod] = {
    "zero3": "popen",
    "zero3_spawn": "spawn",
    "zero3_notebook": "fork",
}


_T = TypeVar("_T")


def _as_options(value: Any, options: type[_T]) -> _T:
    """Return ``value``, or ``options`` made of the dict ``value``; of none if it is None."""
    return value if isinstance(value, options) else options(**(value or {}))


def _parse_offload(value: str | None) -> Offload | None:
    """Return what the option says: a kind, or how much may stay on the device ("20GiB").

    Raises:
        ValueError: it is neither.
    """
    if value is None or value in get_args(OffloadKind):
        return None if value is None else Offload(value)  # type: ignore[arg-type]
    return Offload("parameters", parse_size("offload", "'optimizer', 'parameters'", value))


def _as_time(value: timedelta | float) -> timedelta:
    return value if isinstance(value, timedelta) else timedelta(seconds=value)


class Zero3Strategy(CheckpointStrategy, EvaluationStrategy):
    """Trains with parameters, gradients and optimizer state sharded over all ranks.

    This is stage 3 of ZeRO (arXiv 1910.02054). A LightningModule that trains with
    ``strategy="ddp"`` trains with ``strategy="zero3"`` to the same losses.

    Args:
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer; how processes find each other.
        checkpoint_io: writes and reads checkpoint files.
        precision_plugin: set by the Trainer from ``precision``.
        process_group_backend: "nccl" on CUDA and "gloo" on the CPU by default.
        timeout: time, or seconds, after which a collective that a rank does not join is an error.
        start_method: how ``Trainer(devices=n)`` starts processes: "popen" runs the script again for
            each (as ``ddp``), "spawn", "fork" and "forkserver" use ``multiprocessing``.
        unit_policy: which modules are gathered together: None finds repeated blocks by itself; a
            list of module classes or class names; or a function from the model to a list of modules
            or lists of modules.
        shard_size: number of neighbouring ranks, a node's for example, that share one copy of the
            model; by default all ranks.
        keep_in_fp32: patterns of names of modules or parameters (``"*.router"``) that "bf16-mixed"
            and "16-mixed" gather in fp32, though they are linear or convolution layers: for layers
            that the model runs with autocast off.
        reduce_dtype: "bf16" sends fp32 gradients as bfloat16; ranks add them up in fp32 and in rank
            order.
        reduce_once: with ``accumulate_grad_batches``, each rank adds up the gradients of its
            micro-batches and reduces the sum with the last one, instead of each by itself: fewer
            bytes, for a full-size fp32 gradient in every rank's memory.
        data: how loaders are shared out over the ranks and resumed, see `DataOptions`. With
            ``Trainer(use_distributed_sampler=False)`` loaders are left alone.
        checkpoint: one file or a sharded directory, see `CheckpointOptions`.
        debug: compare each unit with its shards at the end of its use, between several ranks: a
            write past torch (by a pointer, an array), which would be lost, is an error that names
            the parameter.
        start_timeout: how long (a time, or seconds) a process waits for the others to come up,
            before an error names the ranks that did not.
        stop_on_nonfinite: raise at the end of a backward that has nan or inf in the loss or in
            gradients (with "16-mixed" in the loss alone, because the scaler skips steps with such
            gradients). The error names the step, the rank, the unit and the parameters where the
            value first appeared. The check costs one kernel for the loss, and one each for a unit's
            outputs and gradients.
        watch: time limits of the thread that finds ranks which died, hang or are slow; None or
            False for no such thread.
        offload: keep model state in host memory, with the numbers of a run without. "optimizer":
            master values, gradients and optimizer state, of which the device has the shards that
            layers compute with; "parameters": these, too; or how much model state may stay on the
            device ("20GiB"; units are B, MB, MiB, GB, GiB), the rest is as "parameters". Adam,
            AdamW, SGD and Adagrad step on the host while the training goes on, by torch's fused
            kernels.
        activations: "host" moves what layers save for backward to host memory, unit by unit, and
            back a unit ahead; with a size ("8GiB") so much of it stays on the device. Numbers are
            as without. Weights never move, nor tensors below 64 KiB.

    A dict stands for the class of `data`, `checkpoint` and `watch` that it has the options of.

    Raises:
        TypeError: an option of another strategy's; the error says what to write instead.
    """

    strategy_name = "zero3"
    registered_names = tuple(_START_METHODS)

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | float = default_pg_timeout,
        start_method: StartMethod = "popen",
        unit_policy: Sequence[type[nn.Module] | str] | None | UnitPolicy = None,
        shard_size: int | None = None,
        keep_in_fp32: Sequence[str] | str = (),
        reduce_dtype: WireDtype | None = None,
        reduce_once: bool = False,
        # Dicts are taken for the three classes of options, too. They are not annotated: the CLI
        # would take every mapping for one, and not say while it parses what is wrong in it.
        data: DataOptions | None = None,
        checkpoint: CheckpointOptions | None = None,
        debug: bool = False,
        start_timeout: timedelta | float = timedelta(minutes=10),
        stop_on_nonfinite: bool = False,
        watch: WatchOptions | bool | None = True,
        offload: OffloadKind | str | None = None,
        activations: ActivationsKind | str | None = None,
        **others: Never,
    ) -> None:
        refuse_others(others, signature(Zero3Strategy).parameters)
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            _as_time(timeout),
            start_method,
            _as_time(start_timeout),
        )
        self.unit_policy = unit_policy
        self._shard_size = shard_size
        patterns = [keep_in_fp32] if isinstance(keep_in_fp32, str) else keep_in_fp32
        self._keep_in_fp32 = tuple(patterns)
        self._reduce_dtype = wire_dtype(reduce_dtype)
        self._reduce_once = reduce_once
        self._data = DataHooks(_as_options(data, DataOptions))
        self._checkpoints = _as_options(checkpoint, CheckpointOptions)
        self._debug, self._offload = debug, _parse_offload(offload)
        self._activations = parse_activations(activations)
        self._moved: Activations | None = None  # of the engine that is there
        self._stop_on_nonfinite = stop_on_nonfinite
        self._finite_check: FiniteCheck | None = None
        self._watch_options = (
            None
            if watch is None or watch is False
            else _as_options(None if watch is True else watch, WatchOptions)
        )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._data.disable_sampler_injection(self._trainer)
        adapt(self._callbacks)

    @override
    def _configure_launcher(self) -> None:
        if PLAN not in os.environ:
            super()._configure_launcher()
        elif self.parallel_devices is not None:  # one process, whatever the script asks for
            self.parallel_devices, self.num_nodes = self.parallel_devices[:1], 1
            self.set_world_ranks()

    @property
    def _callbacks(self) -> list[pl.Callback]:
        return self._trainer.callbacks  # type: ignore[attr-defined]  # not declared

    # ------------------------------------------------------------------------------------ precision

    @property
    @override
    def precision_plugin(self) -> Precision:
        return (
            self._precision_plugin
            if self._precision_plugin is not None
            else convert(Precision(), self._step_of)
        )

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = (
            None if precision_plugin is None else convert(precision_plugin, self._step_of)
        )

    def _step_of(self, optimizer: Optimizer) -> OptimizerStep:
        assert self.engine is not None
        return self.engine.steps[getattr(optimizer, "_optimizer", optimizer)]

    # --------------------------------------------------------------------------------------- set-up

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.require_savable(trainer)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self._reset_optimizers_and_schedulers()
        if fitting:
            log_graphs(trainer.loggers, trainer.lightning_module)
            # `configure_optimizers` gets the module's own parameters, as the user wrote it.
            self.setup_optimizers(trainer)
        self._shard_model()
        self._load_weights()
        if fitting:
            start_averages(self, self._callbacks)
        self._data.seed_ranks(trainer)
        self.setup_precision_plugin()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Return this rank's share of ``dataloader``; collective.

        The share keeps the loader's own order and resumes with the next sample.
        """
        return self._data.shard(self._trainer, dataloader)

    def _shard_model(self) -> None:
        module = self._trainer.lightning_module
        if PLAN in os.environ:
            accumulates = self._trainer.accumulate_grad_batches > 1
            show_plan(self._trainer, self._engine_options(), self._shard_size, accumulates)
        names = {id(p): name for name, p in module.named_parameters()}
        states = [
            {names[id(p)]: s for p, s in o.state.items() if id(p) in names} for o in self.optimizers
        ]
        group = dist.group.WORLD if _distributed_is_initialized() else None
        if self._shard_size is None:
            self._communicator = make_collectives(group, self.root_device)
        else:
            self._communicator = make_hybrid_collectives(self._shard_size, self.root_device)
        moves = self._offload is not None or self._activations is not None
        if moves and self._communicator.alone:
            self._communicator = LocalCollectives(alone=False)
        self.connect_watch()
        self._groups = ParamGroups(self.optimizers, self._build_engine, self.root_device)
        self.engine = self._build_engine()
        if self.global_rank == 0:
            size, is_on_gpu = self._communicator.world_size, self.root_device.type != "cpu"
            its = module, self.optimizers, self._engine_options(), size, is_on_gpu
            n = len(self.engine.units)
            told = f"{n} unit{'s' * (n != 1)}"
            # an optimizer or a model that cannot be counted must not end a run
            with suppress(Exception):
                state = count_state(self.engine.units, *its)
                nbytes = sum(state.values()) - state["host"] - state["optimizer's step"]
                told += f", state {size_text(nbytes)} a rank"
                if state["host"]:
                    told += f" and {size_text(state['host'])} in host memory"
            self.tell_start(told)
        for optimizer in self.optimizers if self.engine.host is not None else ():
            if type(optimizer) not in FUSED:
                rank_zero_warn(
                    f"Offload: {type(optimizer).__name__} has no fused kernel for the host. It"
                    " steps there while the device waits, several times slower than Adam, AdamW,"
                    " SGD and Adagrad, which step while the training goes on."
                )
        if any(states):  # made of each rank's own initial values, perhaps
            states = broadcast_created_state(self.engine, states)
        self._groups.start(self.engine, states)
        if self.engine.collectives.world_size > 1:
            mark_sharded(module)
        prepare_metrics(module, self._callbacks, self.root_device)
        _update_properties(module, device=self.root_device)

    def _build_engine(self) -> Zero3Engine:
        assert self._communicator is not None
        module, options = self._trainer.lightning_module, self._engine_options()
        budget = options.pop("activations")
        if self._communicator.world_size == 1:  # sends nothing, also where offload copies shards
            options["reduce_dtype"] = None
        initial_values = Initializer(module, self.pending_keys())
        initial_values.fill_buffers()
        engine = Zero3Engine(
            module,
            self.optimizers,
            device=self.root_device,
            collectives=self._communicator,
            initialize=initial_values.fill,
            **options,
        )
        if budget is not None:
            self._moved = Activations(budget, engine)
        if self._stop_on_nonfinite:
            self._finite_check = FiniteCheck(self._trainer, engine)
        return engine

    def _engine_options(self) -> dict[str, Any]:
        module = self._trainer.lightning_module
        kept = kept_names(module, self._keep_in_fp32, self.precision_plugin.precision)
        dtypes = gather_dtypes(module, self.precision_plugin.precision, kept)
        return {
            "unit_policy": self.unit_policy,
            "unit_class": CheckedUnit if self._debug else Unit,
            "slot_dtype": lambda name, p: dtypes.get(name, p.dtype),
            "reduce_dtype": self._reduce_dtype,
            "reduce_once": self._reduce_once,
            "offload": self._offload,
            "activations": self._activations,
        }

    @override
    def model_to_device(self) -> None:
        """Do nothing: the engine moves shards, never the whole model."""

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with (
            torch.device("meta") if empty_init else nullcontext(),
            self.precision_plugin.tensor_init_context(),
        ):
            yield

    @override
    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None and module._trainer is not None and self.engine is not None:
            fitting = module._trainer.state.fn == TrainerFn.FITTING
            if fitting and not module._trainer.interrupted:
                # `_FitLoop.run` has not called `on_run_end` on a rank that had no batch at all.
                self.end_together()
            if fitting and self._layer_sync:
                assert self.model is not None
                self.model = self._layer_sync.revert(self.model)
            if (
                isinstance(self._launcher, _MultiProcessingLauncher)
                and not module._trainer.interrupted
            ):
                # `_MultiProcessingLauncher._collect_rank_zero_results` reads `state_dict` on all
                # ranks, and saves rank 0's for the process that called `fit`.
                self.engine.unshard()
                self.engine = None
        self.stop_watch()
        if self._finite_check is not None:
            self._finite_check.close()
        steps = [] if self.engine is None else list(self.engine.steps.values())
        for step in steps:
            step.abandon()
            # `Strategy.teardown` of Lightning reads all, to move it to the CPU
            step.optimizer.state = {}  # type: ignore[assignment]
        if self.engine is not None:
            self.engine.end_run()
        super().teardown()
        for step in steps:
            step.optimizer.state = step.state_of_parameters  # type: ignore[assignment]

    # ---------------------------------------------------------------------------------------- steps

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.engine is not None
        self.engine.structure.check()
        self._data.on_train_start(self._trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        # `_TrainingEpochLoop.advance` calls this after the user's hooks, which may edit groups, and
        # before the optimizer uses them.
        self._follow_groups()
        assert self.engine is not None
        self._data.on_train_batch_start(self._trainer, self.engine.collectives.all_gather_object)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.engine is not None
        with self.engine.step(gradients_over=self._are_gradients_over()):
            return super().training_step(*args, **kwargs)

    def _are_gradients_over(self) -> bool:
        """Return whether Lightning clears gradients before a hook can look at them.

        Its closure calls `training_step`, then `optimizer_zero_grad`, then `backward`.
        """
        trainer = self._trainer
        module = trainer.lightning_module
        return (
            module.automatic_optimization
            # `StochasticWeightAveraging` sets it for its last epoch, which clears no gradients.
            and not trainer.fit_loop._skip_backward
            and trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
            and not any(
                is_overridden("on_before_zero_grad", callback, pl.Callback)
                for callback in self._callbacks
            )
            and not any(
                is_overridden(hook, module)
                for hook in ("on_before_zero_grad", "optimizer_zero_grad")
            )
        )

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self.lightning_module is not None and self.engine is not None
        self.pre_backward(closure_loss)
        if self._finite_check is not None:
            self._finite_check.record_loss(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        # hazard: the user's `on_after_backward` may read gradients, which are complete only at the
        # end of this context.
        with self.engine.backward():
            self.precision_plugin.backward(
                closure_loss, self.lightning_module, optimizer, *args, **kwargs
            )
        if self._finite_check is not None:
            self._finite_check.check(self._trainer.global_step)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def block_backward_sync(self) -> Any:
        """Return the context of all micro-batches of an accumulation window but the last."""
        return nullcontext() if self.engine is None else self.engine.accumulate()

    def gathered(
        self,
        what: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None = None,
        modify: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context in which parameters have their full values; collective.

        All ranks enter it. Inside, any rank may read or write parameters alone; gradients are read
        and written by all ranks together.

        Args:
            what: a module of the model, or some parameters; the whole model by default.
            modify: store rank 0's values at exit.

        Raises:
            ResidencyError: at exit, if a parameter was changed without ``modify``.
        """
        what = self.lightning_module if what is None else what
        return nullcontext() if what is None else gathered(what, modify)

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm [] of the gradient of all parameters that an optimizer has; collective.

        It is that of the mean over ranks, as ``torch.nn.utils.clip_grad_norm_`` returns it of one
        process. Each rank adds up its own shards, and one number is exchanged. In
        ``on_before_optimizer_step`` gradients are complete, without a scaler's factor, and not
        clipped yet. On the CPU there are none inside of ``training_step``, and it is 0.

        Returns:
            fp32, or float64 if a parameter is.

        Raises:
            ResidencyError: the gradients are on their way.
        """
        assert self.engine is not None
        trained = self.engine.gradients.trained
        norm = self.engine.gradient_norm(trained)
        is_double = any(e.dtype in (torch.float64, torch.complex128) for e in trained)
        return norm if is_double else norm.float()

    def _follow_groups(self) -> None:
        assert self.engine is not None
        for optimizer in self.optimizers:
            if optimizer not in self.engine.steps:
                raise ValueError(
                    f"This {type(optimizer).__name__} was not there when the parameters were"
                    " sharded. Return it from `configure_optimizers`, or add a param group to one"
                    " that is there."
                )
        old_engine, self.engine = self.engine, self._groups.apply_edits(self.engine)
        if self.engine is not old_engine:
            move_averages(self._callbacks, old_engine, self.engine)
            del old_engine
            gc.collect()  # modules and engines hold each other: two would have their shards

    def memory_ledger(self, per_unit: bool = False) -> dict[str, Any]:
        """Return bytes on this rank by category.

        The categories are parameters, gradients, optimizer_state, unsharded_units, reduce_buffer,
        buffers, and host: what is in host memory of all these.

        Args:
            per_unit: add "units": bytes of the shards of parameters, gradients and optimizer state
                by the name of their unit.
        """
        assert self.engine is not None and self.lightning_module is not None
        ledger: dict[str, Any] = by_category(self.engine, self.lightning_module)
        ledger["host"] += 0 if self._moved is None else self._moved.memory.nbytes
        return {**ledger, "units": by_unit(self.engine)} if per_unit else ledger

    # ------------------------------------------------------------------------------------- registry

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, method in _START_METHODS.items():
            strategy_registry.register(
                name, cls, description=f"ZeRO-3, processes started by {method}", start_method=method
            )
