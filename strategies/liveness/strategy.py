"""The part of the strategy that says what each rank is doing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _distributed_is_initialized
from lightning.pytorch.loops import _FitLoop
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import distributed_c10d
from typing_extensions import override

from ..collectives import DivergenceError, Meeting, make_clock
from ..engine import Zero3Engine, compare_notes
from ..launch.process_strategy import ProcessStrategy
from .device_idle import DeviceWaits, streams_of
from .position import Activity
from .watchdog import Watch, WatchOptions

# What a rank does in each method of the strategy.
_ACTIVITIES = {
    "training_step": Activity.FORWARD,
    "backward": Activity.BACKWARD,
    "optimizer_step": Activity.OPTIMIZER,
    "validation_step": Activity.VALIDATION,
    "test_step": Activity.TEST,
    "predict_step": Activity.PREDICT,
    "lightning_module_state_dict": Activity.SAVING,
    "optimizer_state": Activity.SAVING,
    "save_checkpoint": Activity.SAVING,
    "_dump_checkpoint": Activity.SAVING,
    "load_checkpoint": Activity.LOADING,
    "on_train_batch_start": Activity.BETWEEN,
}
_TRAINING = (Activity.FORWARD, Activity.BACKWARD, Activity.OPTIMIZER)


def _watched(method: Callable[..., Any], activity: Activity) -> Callable[..., Any]:
    @wraps(method)
    def call(self: WatchedStrategy, *args: Any, **kwargs: Any) -> Any:
        if self.watch is None:
            return method(self, *args, **kwargs)
        if activity is Activity.BETWEEN:
            self._begin_step(self.watch)
            return method(self, *args, **kwargs)
        if activity not in _TRAINING and self.watch.device_waits is not None:
            self.watch.device_waits.end_step()
        with self.watch.doing(activity):
            return method(self, *args, **kwargs)

    return call


class WatchedStrategy(ProcessStrategy):
    """Processes that know of each other's ends: the watch is told what each method of a subclass
    does.
    """

    watch: Watch | None = None
    engine: Zero3Engine | None
    _watch_options: WatchOptions | None = None
    _runs = 0  # of this process: the same number on all ranks
    _has_ended = False  # training has, on all ranks

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, activity in _ACTIVITIES.items():
            method = getattr(cls, name)
            if not hasattr(method, "__wrapped__"):
                setattr(cls, name, _watched(method, activity))

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        WatchedStrategy._runs += 1
        self._has_ended = False
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        # Before any `on_train_end`: what rank 0 does alone there, however long, keeps nobody
        # waiting.
        loop.on_run_end = partial(_end_run, loop)  # type: ignore[method-assign]
        if (
            self._watch_options is None
            or not _distributed_is_initialized()
            or dist.get_world_size() == 1
        ):
            return
        # A connection of its own: the training thread may wait in the other one.
        store = dist.PrefixStore(
            f"lightning_zero3/watch/{self._runs}", distributed_c10d._get_default_store().clone()
        )
        self.watch = Watch(self._watch_options, store, dist.get_rank(), dist.get_world_size())
        connector = self.lightning_module.trainer._checkpoint_connector
        connector.dump_checkpoint = partial(self._dump_checkpoint, connector)  # type: ignore[method-assign]

    def _dump_checkpoint(
        self, connector: _CheckpointConnector, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What Lightning collects for a checkpoint, from the user's `on_save_checkpoint` too."""
        return type(connector).dump_checkpoint(connector, weights_only)

    def show_progress(self) -> None:
        """The engine writes where it is to where the watch looks."""
        if self.watch is not None and self._communicator is not None:
            self._communicator.exchange_log.progress = self.watch.position.progress
            self.watch.unit_name, self.watch.communicator = self._unit_name, self._communicator
            if self.root_device.type == "cuda":
                self.watch.device_waits = DeviceWaits(make_clock(self.root_device))

    def _begin_step(self, watch: Watch) -> None:
        assert self.lightning_module is not None and self.engine is not None
        watch.position.begin_step(self.lightning_module.trainer.global_step)
        if watch.device_waits is not None:
            watch.device_waits.begin_step(streams_of(self.engine))

    def _unit_name(self, index: int) -> str:
        units = self.engine.units if self.engine is not None else []
        return units[index].name if index < len(units) else str(index)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._has_ended = False

    def end_together(self) -> None:
        """Wait for the others at the end of training; ranks that still train are told apart from
        those that do not.

        Raises:
            DivergenceError: one rank has more batches than another; on all ranks.
        """
        if not self._has_ended:
            self._has_ended = True
            self._wait_for_all(Meeting.END)
            if self.engine is not None:
                compare_notes(self.engine.collectives)

    def stop_watch(self) -> None:
        """The run is over on this rank."""
        if self.watch is not None:
            if self.watch.device_waits is not None:
                self.watch.device_waits.end_step()
            self.watch.stop()
            self.watch = None

    def ends_alike(self, exception: BaseException) -> bool:
        """Whether all ranks end with such an error at this place, so that they can save together;
        waits for them a while.
        """
        # what a forward wrote to the shards may be another thing on each rank
        if isinstance(exception, DivergenceError):
            return False
        # After SIGTERM all ranks stop together.
        return (
            self.watch is None
            or isinstance(exception, SIGTERMException)
            or self.watch.all_end_with(exception)
        )

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self.watch is not None and not isinstance(exception, SIGTERMException):
            self.watch.ends_with(exception)


def _end_run(loop: _FitLoop) -> None:
    strategy = loop.trainer.strategy
    assert isinstance(strategy, WatchedStrategy)
    strategy.end_together()
    type(loop).on_run_end(loop)
