"""The processes of a run: their ranks, their start, and the collectives that Lightning asks for."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _sync_ddp_if_available,
)
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from lightning.pytorch.trainer.call import _interrupt
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only
from torch import Tensor
from typing_extensions import override

from ..collectives import LocalCollectives, Meeting
from .cluster_environment import DetectedEnvironment, choose_environment, identify
from .detect import list_variables
from .host import visible_devices
from .orphans import PARENT_VARIABLE, end_with_parent
from .rendezvous import end_process_group, listen, refuse, serve_at, start_process_group
from .signals import AgreedSignals
from .world import LOOPBACK, LaunchError, Request, World

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


_SAID: set[str] = set()


class _ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the other ranks as scripts; this process becomes rank 0 and keeps its port open.

    Lightning's ``LightningEnvironment.main_port`` finds a free port and closes it, so that another
    process may take it before rank 0 does.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_lightnings = type(self.cluster_environment) is LightningEnvironment
        if is_lightnings and not {"MASTER_ADDR", "MASTER_PORT"} & os.environ.keys():
            os.environ["MASTER_PORT"] = str(serve_at(listen(LOOPBACK[0])))
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        os.environ.pop("RANK", None)  # the only one of its pod; Lightning numbers by LOCAL_RANK
        try:
            return super().launch(function, *args, **kwargs)
        except BaseException:
            # hazard: without this process, rank 0, the others would wait for ever to meet it
            if not _distributed_is_initialized():
                self.kill(signal.SIGTERM)
            raise


class _ForkLauncher(_MultiProcessingLauncher):
    """Starts all ranks by multiprocessing, and says how they ended."""

    # gives the trainer back the callbacks that it lacks while it handles an error
    _restore_callbacks: Callable[[], None] | None = None

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Any = None,  # Lightning does not declare its `callbacks`
        **kwargs: Any,
    ) -> Any:
        self.restore_trainer()
        is_given = "MASTER_PORT" in os.environ
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            self.kill(signal.SIGTERM)
            # Lightning's `_interrupt` would let `Checkpoint` callbacks save in this process, which
            # is no rank. The ranks have saved already, if they could.
            if trainer is not None:
                self._restore_callbacks = partial(setattr, trainer, "callbacks", trainer.callbacks)
                trainer.callbacks = [
                    callback
                    for callback in trainer.callbacks
                    if not isinstance(callback, Checkpoint)
                ]
            raise
        finally:
            if not is_given:  # the next launch gets a port of its own
                os.environ.pop("MASTER_PORT", None)

    def restore_trainer(self) -> None:
        """Give the trainer all its callbacks back."""
        if self._restore_callbacks is not None:
            self._restore_callbacks()
            self._restore_callbacks = None

    @override
    def _wrapping_function(
        self, process_idx: int, trainer: pl.Trainer | None, *args: Any, **kwargs: Any
    ) -> None:
        try:
            super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except BaseException as error:
            # Lightning's `_call_and_handle_interrupt` does this only in the process that called
            # `fit`, which is no rank.
            if trainer is not None:
                _interrupt(trainer, error)
                trainer._teardown()
            # hazard: if a rank exits with status 0, as after SIGTERM, the process that called `fit`
            # waits for its result for ever
            if isinstance(error, KeyboardInterrupt) or (
                isinstance(error, SystemExit) and not error.code
            ):
                raise SystemExit(1) from error
            raise


class ProcessStrategy(ParallelStrategy):
    """One process for each device, as ``ddp`` has them, without any knowledge of models.

    Subclasses set the defaults of the arguments.
    """

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
        process_group_backend: str | None,
        timeout: timedelta,
        start_method: StartMethod,
        start_timeout: timedelta,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        # Set past the property's setter: an environment that the user passes is never replaced.
        self._cluster_environment = cluster_environment
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method: StartMethod = start_method
        # From the sharding of the model on, also Lightning's collectives have labels in its log.
        self._communicator: LocalCollectives | None = None
        self._start_timeout = start_timeout
        self._signals: AgreedSignals | None = None
        self._reduced = torch.get_default_dtype()  # of the last real numbers
        self.world: World | None = None  # this process's record, from `setup_environment` on

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Lightning's environment, or ours if Lightning does not know the launcher."""
        return self._cluster_environment

    @cluster_environment.setter
    def cluster_environment(self, cluster_environment: ClusterEnvironment | None) -> None:
        self._cluster_environment = (
            None if cluster_environment is None else choose_environment(cluster_environment)
        )

    @property
    def is_distributed(self) -> bool:
        """True, so that Lightning shards data and synchronises logged values."""
        return True

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        # where a cluster environment owns the layout, the Trainer may have been given one device
        return self.parallel_devices[self.local_rank % len(self.parallel_devices)]

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the process group."""
        return self._process_group_backend

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        assert self.world is not None
        return {"num_replicas": self.world.world_size, "rank": self.world.rank}

    def set_world_ranks(self) -> None:
        """Set this process's ranks in the cluster environment and in the rank-zero utilities."""
        try:
            if isinstance(self.cluster_environment, DetectedEnvironment):
                self.cluster_environment.request = self._request()
            if self.cluster_environment is not None:
                self.cluster_environment.set_global_rank(
                    self.node_rank * self.num_processes + self.local_rank
                )
                self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            # From the environment, because some environments ignore the setter.
            for function in (rank_zero_only, fabric_rank_zero_only):
                function.rank = self.global_rank  # type: ignore[attr-defined]  # not declared
        except ValueError as error:
            raise LaunchError(
                f"A variable of the launcher is no whole number ({error})."
                f" {list_variables(os.environ)}"
            ) from error

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        is_launched = self.cluster_environment.creates_processes_externally
        is_lightnings = type(self.cluster_environment) is LightningEnvironment
        port = os.environ.get("MASTER_PORT")
        if is_lightnings and port is not None and not port.strip().isdecimal():
            raise LaunchError(f"MASTER_PORT={port!r} is not a port. Correct or unset MASTER_PORT.")
        if is_lightnings and self.num_nodes > 1 and port is None:
            raise LaunchError(
                f"Trainer(num_nodes={self.num_nodes}) starts processes on each node, but"
                " MASTER_PORT is not set.\nSet it to a free port of rank 0's host, and MASTER_ADDR"
                " to that host, alike on all nodes (and NODE_RANK to each one's number), or start"
                " with torchrun."
            )
        if self._start_method != "popen" and is_launched:
            raise LaunchError(
                f"Zero3Strategy(start_method={self._start_method!r}) starts processes, but"
                f" {type(self.cluster_environment).__name__} says that a launcher has started"
                f" this one, so each of its processes would train by itself."
                f' {list_variables(os.environ)}\nUse strategy="zero3", or start the script'
                " without a launcher."
            )
        if self._start_method != "popen":
            # hazard: a fork would inherit the process group of an earlier fit without its threads
            end_process_group()
            self._launcher = _ForkLauncher(self, start_method=self._start_method)
        elif not is_launched and self.num_processes * self.num_nodes > 1:
            if _IS_INTERACTIVE:
                raise LaunchError(
                    f'Trainer(strategy="zero3", devices={self.num_processes}) runs the script again'
                    ' in every process, which a notebook cannot. Use strategy="zero3_notebook", or'
                    ' Zero3Strategy(start_method="fork").'
                )
            self._launcher = _ScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def _request(self) -> Request:
        return Request(
            self.num_processes,
            self.num_nodes,
            self._start_method,
            bool(_IS_INTERACTIVE),
            self._process_group_backend,
        )

    @override
    def setup_environment(self) -> None:
        assert self.cluster_environment is not None and self.parallel_devices is not None
        self.set_world_ranks()
        devices = visible_devices(self.parallel_devices[0].type)
        try:
            self.world = identify(self.cluster_environment, devices, self._request())
        except LaunchError as error:
            refuse(error, self._start_timeout)
            raise
        if self.world.launcher == "torchrun":
            self.num_nodes = self.world.num_nodes
        super().setup_environment()
        reset_seed()
        self._process_group_backend = self.world.backend
        device = self.root_device if self.root_device.type != "cpu" else None
        with end_with_parent(self.world):
            start_process_group(self.world, self._timeout, self._start_timeout, device)
        assert self.lightning_module is not None
        self._signals = AgreedSignals.take_over(self.lightning_module.trainer)

    def tell_start(self, more: str) -> None:
        """Print where the ranks run, with what is known of the model; once."""
        assert self.world is not None
        ranks, nodes = self.world.world_size, self.world.num_nodes
        line = (
            f"zero3: {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)},"
            f" {self.world.backend}, by {self.world.launcher}"
        )
        if line not in _SAID:
            _SAID.add(line)
            rank_zero_info(f"{line}; {more}")

    @override
    def teardown(self) -> None:
        # Not `ParallelStrategy.teardown`: `Strategy.teardown`, which it calls, would move the
        # module's sharded parameters to the CPU. The other calls of both follow here.
        if isinstance(self._launcher, _ForkLauncher):
            self._launcher.restore_trainer()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        module = self.lightning_module
        if module is not None and module._trainer is not None and module._trainer.interrupted:
            # Otherwise the group ends at exit, because users gather and save after `fit`.
            end_process_group(failed=True)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._wait_for_all(Meeting.BARRIER)

    def _wait_for_all(self, meeting: Meeting) -> None:
        if _distributed_is_initialized():
            self._meet(meeting)
            dist.barrier(
                device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None
            )

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        if not _distributed_is_initialized():
            return obj
        self._meet(Meeting.OBJECTS)
        box = [obj]
        dist.broadcast_object_list(box, src, group=dist.group.WORLD)
        return box[0]

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if tensor.is_floating_point():
            self._reduced = tensor.dtype
        elif reduce_op in (None, "mean", "avg"):
            # Lightning's `_sync_ddp` would divide in integers, but a metric's batch sizes differ
            # on uneven ranks. `_ResultMetric.compute` reduces the metric's sum before them, and the
            # quotient has its dtype.
            tensor = tensor.to(torch.promote_types(self._reduced, torch.get_default_dtype()))
        self._meet(Meeting.SUM)
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self._meet(Meeting.VALUES)
        return super().all_gather(tensor, group, sync_grads)

    def _meet(self, meeting: Meeting) -> None:
        # hazard: this rank waits for ever if the others gather a weight instead
        if self._communicator is not None and _distributed_is_initialized():
            self._communicator.meet(meeting)
