"""The Lightning strategy: each Trainer hook is a few calls of the engine."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

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
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from .adapters.lightning_callbacks import adapt, follow, start_averages
from .checkpoints import CheckpointOptions, CheckpointStrategy
from .collectives import make_collectives, make_hybrid_collectives
from .data import DataHooks, DataOptions
from .engine import UnitPolicy, Zero3Engine, gathered
from .engine.memory_ledger import by_category, by_unit
from .evaluation.strategy import EvaluationStrategy
from .evaluation.torchmetrics import share_metrics
from .launch.host import require_sync_batch_norm
from .launch.process_strategy import StartMethod
from .liveness.watchdog import WatchOptions
from .numerics.nonfinite import FiniteCheck
from .numerics.precision import WireDtype, convert, gather_dtypes, kept_names, wire_dtype
from .numerics.rerun import SecondRun
from .optimizers.param_groups import ParamGroups
from .state_dicts.optimizer_state import of_rank_zero

_NAMES: dict[str, StartMethod] = {
    "zero3": "popen",
    "zero3_spawn": "spawn",
    "zero3_notebook": "fork",
}


class Zero3Strategy(CheckpointStrategy, EvaluationStrategy):
    """Trains with parameters, gradients and optimizer state sharded over all ranks (ZeRO stage 3,
    arXiv 1910.02054).

    A LightningModule that trains with ``strategy="ddp"`` trains with ``strategy="zero3"`` to the
    same losses.

    Args:
        accelerator: set by the Trainer.
        parallel_devices: set by the Trainer.
        cluster_environment: set by the Trainer; how processes find each other.
        checkpoint_io: writes and reads checkpoint files.
        precision_plugin: set by the Trainer from ``precision``.
        process_group_backend: "nccl" on CUDA and "gloo" on the CPU by default.
        timeout: after which a collective that a rank does not join is an error.
        start_method: how ``Trainer(devices=n)`` starts processes: "popen" runs the script again for
            each (as ``ddp``), "spawn", "fork" and "forkserver" use ``multiprocessing``.
        unit_policy: which modules are gathered together: None finds repeated blocks by itself; a
            list of module classes or class names; or a function from the model to a list of modules
            or lists of modules.
        shard_size: shard over groups of so many neighbouring ranks, a node's for example, each of
            which has all of the model; by default over all ranks.
        keep_in_fp32: patterns of names of modules or parameters (``"*.router"``) that "bf16-mixed"
            and "16-mixed" gather in fp32, though they are linear or convolution layers: for those
            that the model runs with autocast off.
        gather_dtype: "bf16" sends fp32 parameters as bfloat16, except those in ``keep_in_fp32``:
            layers compute in fp32 with rounded weights. The shards that the optimizer steps on stay
            exact.
        reduce_dtype: "bf16" sends fp32 gradients as bfloat16; they are added up in fp32 and in rank
            order.
        reduce_once: with ``accumulate_grad_batches``, add the gradients of the micro-batches up on
            each rank and reduce them with the last one, instead of each by itself: fewer bytes, for
            a full-size fp32 gradient in every rank's memory.
        data: how loaders are shared out over the ranks and resumed; see
            :class:`~lightning_zero3.strategies.data.DataOptions`. With
            ``Trainer(use_distributed_sampler=False)`` loaders are left alone.
        checkpoint: sharded directories or full files; see
            :class:`~lightning_zero3.strategies.checkpoints.CheckpointOptions`.
        debug: memory that a unit has given up reads as NaN, and writes that would not reach the
            shards are errors. No two units share memory then: it takes that of the whole model on
            every rank.
        start_timeout: how long a process waits for the others to come up, before an error names
            those that did not.
        cpu_affinity: run each process on the CPUs of its GPU's NUMA node, unless its launcher has
            bound it already.
        stop_on_nonfinite: look at the loss and at each flat group of gradients, with a kernel each,
            and raise at the end of a backward with nan or inf (with "16-mixed" in the loss, because
            the scaler skips steps with such gradients), naming the step, the rank, the unit and the
            parameters where it first appeared. To find these the micro-batch is run once more,
            ``training_step`` included; with manual optimization, `reduce_once` or a
            ``dataloader_iter``, where it cannot be, a kernel looks at each unit's outputs and
            gradients in every step.
        watch: time limits of the thread that finds ranks which died, hang or are slow; None for no
            such thread.
    """

    strategy_name = "zero3"
    registered_names = tuple(_NAMES)

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = default_pg_timeout,
        start_method: StartMethod = "popen",
        unit_policy: Sequence[type[nn.Module] | str] | None | UnitPolicy = None,
        shard_size: int | None = None,
        keep_in_fp32: Sequence[str] = (),
        gather_dtype: WireDtype | None = None,
        reduce_dtype: WireDtype | None = None,
        reduce_once: bool = False,
        data: DataOptions | None = None,
        checkpoint: CheckpointOptions | None = None,
        debug: bool = False,
        start_timeout: timedelta = timedelta(minutes=10),
        cpu_affinity: bool = True,
        stop_on_nonfinite: bool = False,
        watch: WatchOptions | None = WatchOptions(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend,
            timeout,
            start_method,
            start_timeout,
            cpu_affinity,
        )
        self.unit_policy = unit_policy
        self._shard_size = shard_size
        self._keep_in_fp32 = tuple(keep_in_fp32)
        self._gather_dtype, self._reduce_dtype = wire_dtype(gather_dtype), wire_dtype(reduce_dtype)
        self._reduce_once = reduce_once
        self._data = DataHooks(data)
        self._checkpoints = checkpoint or CheckpointOptions()
        self._debug = debug
        self._stop_on_nonfinite = stop_on_nonfinite
        self._finite: FiniteCheck | None = None
        self._second_run: SecondRun | None = None  # where a micro-batch can be run again
        self._watch_options = watch

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._data.take_over(self._trainer)
        adapt(self._trainer.callbacks)

    # ------------------------------------------------------------------------------------ precision

    @property
    @override
    def precision_plugin(self) -> Precision:
        return (
            self._precision_plugin
            if self._precision_plugin is not None
            else self._convert(Precision())
        )

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        self._precision_plugin = (
            None if precision_plugin is None else self._convert(precision_plugin)
        )

    def _convert(self, plugin: Precision) -> Precision:
        return convert(plugin, self._sum, self._adopt, self._unguard)

    def _sum(self, value: Tensor) -> Tensor:
        assert self.engine is not None
        return self.engine.collectives.all_reduce(value.to(self.root_device))

    def _adopt(self) -> None:
        if self.engine is not None:
            self.engine.adopt_gradients()

    def _unguard(self, optimizer: Optimizer) -> None:
        if self.engine is not None:
            self.engine.hand_over(optimizer)

    # --------------------------------------------------------------------------------------- set-up

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None and self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.require_local_folders(trainer)
        if fitting and self._layer_sync:
            require_sync_batch_norm(self.model, self.root_device)
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self._reset_optimizers_and_schedulers()
        if fitting:
            # On the module's own parameters, as the user wrote it; the engine re-points every group
            # to its flat shard.
            self.setup_optimizers(trainer)
        self._shard()
        self._load_weights()
        if fitting:
            start_averages(self, trainer.callbacks)
        self._data.seed_ranks(trainer)
        self.setup_precision_plugin()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """This rank's share of ``dataloader``, which keeps its own order and resumes with the next
        sample; collective.
        """
        return self._data.shard(self._trainer, dataloader)

    def _shard(self) -> None:
        module = self.lightning_module
        assert module is not None
        names = {id(p): name for name, p in module.named_parameters()}
        states = [
            {names[id(p)]: s for p, s in o.state.items() if id(p) in names} for o in self.optimizers
        ]
        group = dist.group.WORLD if _distributed_is_initialized() else None
        if self._shard_size is None:
            self._communicator = make_collectives(group, self.root_device)
        else:
            self._communicator = make_hybrid_collectives(self._shard_size, self.root_device)
        self.show_progress()
        self._groups = ParamGroups(self.optimizers, self._build_engine, self.root_device)
        self.engine = self._build_engine()
        if self._report_differing(self.engine):
            states = of_rank_zero(self.engine, states)
        self._groups.start(self.engine, states)
        share_metrics(module, self.root_device)
        _update_properties(module, device=self.root_device)

    def _build_engine(self) -> Zero3Engine:
        module = self.lightning_module
        assert module is not None
        kept = kept_names(module, self._keep_in_fp32, self.precision_plugin.precision)
        dtypes = gather_dtypes(module, self.precision_plugin.precision, kept)
        wire = self._gather_dtype or torch.float32
        return Zero3Engine(
            module,
            self.optimizers,
            device=self.root_device,
            collectives=self._communicator,
            unit_policy=self.unit_policy,
            debug=self._debug,
            slot_dtype=lambda name, p: dtypes.get(name, p.dtype),
            wire_dtype=lambda name, p: torch.float32 if name in kept else wire,
            reduce_dtype=self._reduce_dtype,
            reduce_once=self._reduce_once,
        )

    def _report_differing(self, engine: Zero3Engine) -> bool:
        everyone = engine.collectives.all_gather_object(engine.differing[:3])
        for rank, names in enumerate(everyone):
            if names:
                rank_zero_warn(
                    f"Rank {rank} initialised {names[0]!r} (and perhaps others) differently from"
                    " rank 0. All ranks now have rank 0's values; call `seed_everything` for the"
                    " same model in every run."
                )
                return True
        return False

    @override
    def model_to_device(self) -> None:
        """Nothing: the engine moves shards, never the whole model."""

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
                self.end_together()  # where a rank had no batch at all
            if fitting and self._layer_sync:
                self.model = self._layer_sync.revert(self.model)
            if (
                isinstance(self._launcher, _MultiProcessingLauncher)
                and not module._trainer.interrupted
            ):
                # the launcher sends rank 0's state_dict to the process that called fit
                self.engine.unshard()
                self.engine = None
        self.stop_watch()
        self._check_values(None)
        super().teardown()

    # ---------------------------------------------------------------------------------------- steps

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self.engine is not None and self.lightning_module is not None
        self.engine.structure.check()
        self._data.on_train_start(self._trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        # after the user's hooks, and before the optimizer looks at its groups
        self._follow_groups()
        self._data.on_train_batch_start(self._trainer)
        if self._stop_on_nonfinite and (
            self._finite is None or self._finite.engine is not self.engine
        ):
            self._check_values(self.engine)
        if self._second_run is not None:
            self._second_run.begin()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.engine is not None
        with self.engine.step(gradients_over=self._are_gradients_over()):
            return super().training_step(*args, **kwargs)

    def _are_gradients_over(self) -> bool:
        """Whether Lightning clears gradients after this `training_step`, and no hook can look at
        them before.
        """
        assert self.lightning_module is not None
        trainer, module = self._trainer, self.lightning_module
        return (
            module.automatic_optimization
            and not trainer.fit_loop._skip_backward  # in SWA's last epoch, which clears none
            and trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0
            and not any(
                is_overridden("on_before_zero_grad", callback, pl.Callback)
                for callback in trainer.callbacks
            )
            and not any(
                is_overridden(hook, module)
                for hook in ("on_before_zero_grad", "optimizer_zero_grad")
            )
        )

    def _check_values(self, engine: Zero3Engine | None) -> None:
        """From now on for nan and inf in steps of ``engine``; None: no more."""
        if self._finite is not None:
            self._finite.close()
        self._finite = self._second_run = None
        if engine is None:
            return
        step = self._trainer.lightning_module.training_step
        fetches = is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
        if (
            self._trainer.lightning_module.automatic_optimization
            and not engine.reducer.once
            and not fetches
        ):
            self._second_run = SecondRun(self._trainer, engine, super().training_step)
        # A loss scaler skips steps whose gradients overflow.
        self._finite = FiniteCheck(
            engine, self._second_run, gradients=self.precision_plugin.precision != "16-mixed"
        )

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self.lightning_module is not None and self.engine is not None
        self.pre_backward(closure_loss)
        if self._finite is not None:
            self._finite.loss(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._groups.require_cleared(self.engine)
        # Gradients are complete before `on_after_backward` looks at them.
        with self.engine.backward():
            self.precision_plugin.backward(
                closure_loss, self.lightning_module, optimizer, *args, **kwargs
            )
        if self._finite is not None:
            self._finite.check(self._trainer.global_step)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Around all micro-batches of a window but the last."""
        return nullcontext() if self.engine is None else self.engine.accumulate()

    def gathered(
        self,
        what: nn.Module | nn.Parameter | Iterable[nn.Parameter] | None = None,
        modify: bool = False,
    ) -> AbstractContextManager[None]:
        """Inside, parameters have their full values; to be entered by all ranks, and read or
        written by any; gradients by all.

        Args:
            what: a module of the model, or some parameters; the whole model by default.
            modify: store rank 0's values at exit.

        Raises:
            ResidencyError: at exit, a parameter was changed without ``modify``.
        """
        what = self.lightning_module if what is None else what
        return nullcontext() if what is None else gathered(what, modify)

    @contextmanager
    def param_groups(self) -> Generator[None, None, None]:
        """Inside, optimizers' param groups hold the module's own parameters, to be edited; between
        steps, on all ranks.
        """
        if self.engine is None:
            yield
            return
        with self._groups.shown(self.engine):
            yield
        self._follow_groups()

    def _follow_groups(self) -> None:
        assert self.engine is not None
        before, self.engine = self.engine, self._groups.follow(self.engine)
        if self.engine is not before:
            follow(self._trainer.callbacks, before, self.engine)

    def memory_ledger(self, per_unit: bool = False) -> dict[str, Any]:
        """Bytes on this rank by category: parameters, gradients, optimizer_state, slots, buffers.

        Args:
            per_unit: add "units": shards of parameters, gradients and optimizer state by the name
                of their unit.
        """
        assert self.engine is not None and self.lightning_module is not None
        ledger: dict[str, Any] = by_category(self.engine, self.optimizers, self.lightning_module)
        return {**ledger, "units": by_unit(self.engine, self.optimizers)} if per_unit else ledger

    # ------------------------------------------------------------------------------------- registry

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        for name, method in _NAMES.items():
            strategy_registry.register(
                name, cls, description=f"ZeRO-3, processes started by {method}", start_method=method
            )
