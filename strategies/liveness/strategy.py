"""The part of the strategy that writes down what each rank does."""

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

from ..collectives import DivergenceError, Meeting
from ..engine import Zero3Engine, compare_notes
from ..launch.process_strategy import ProcessStrategy
from .position import Activity, Card, Position
from .watchdog import Watch, WatchOptions

# Method of the strategy -> what a rank does in it.
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
    "on_train_start": Activity.BETWEEN,  # the first batch is loaded after it
    "on_train_batch_start": Activity.BETWEEN,
}


def _write_activity(method: Callable[..., Any], activity: Activity) -> Callable[..., Any]:
    @wraps(method)
    def call(self: WatchedStrategy, *args: Any, **kwargs: Any) -> Any:
        if self.watch is None:
            return method(self, *args, **kwargs)
        position = self.watch.position
        if activity is Activity.BETWEEN:
            assert self.lightning_module is not None
            position.begin_step(self.lightning_module.trainer.global_step)
            return method(self, *args, **kwargs)
        before, position.activity = position.activity, activity
        result = method(self, *args, **kwargs)
        position.activity = before  # not after an error: the position says where it happened
        return result

    call.writes_activity = True  # type: ignore[attr-defined]
    return call


class WatchedStrategy(ProcessStrategy):
    """Processes that find each other's ends.

    On every subclass, a user's too, the methods named in ``_ACTIVITIES`` are wrapped, so that each
    writes to the watch what this rank does.
    """

    watch: Watch | None = None
    engine: Zero3Engine | None
    _watch_options: WatchOptions | None = None
    _has_ended = False  # whether training has ended on all ranks

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, activity in _ACTIVITIES.items():
            method = getattr(cls, name)
            # Not `__wrapped__`, which any decorator sets. What decorates a method that writes has
            # the mark too, by `functools.wraps`.
            if not hasattr(method, "writes_activity"):
                setattr(cls, name, _write_activity(method, activity))

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._has_ended = False
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        # `_FitLoop.on_run_end` calls the hooks `on_train_end`. All ranks end together before it, so
        # that none waits in an exchange while rank 0 works alone in such a hook.
        loop.on_run_end = partial(_end_run, loop)  # type: ignore[method-assign]
        if (
            self._watch_options is None
            or not _distributed_is_initialized()
            or dist.get_world_size() == 1
        ):
            return
        rank, position = dist.get_rank(), Position()
        cards: list[Any] = [None] * dist.get_world_size()
        self._meet(Meeting.OBJECTS)
        dist.all_gather_object(cards, Card.of(position))
        # hazard: the watch must not wait for the default store's connection, which the training
        # thread may hold while it waits there.
        default_store: Any = distributed_c10d._get_default_store()  # torch's stub lacks `clone`
        # A late process of another run writes elsewhere.
        store = dist.PrefixStore(f"lightning_zero3/watch/{cards[0].run}", default_store.clone())
        self.watch = Watch(self._watch_options, store, rank, cards, position)
        connector = self.lightning_module.trainer._checkpoint_connector
        connector.dump_checkpoint = partial(self._dump_checkpoint, connector)  # type: ignore[method-assign]

    def _dump_checkpoint(
        self, connector: _CheckpointConnector, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Collect a checkpoint as Lightning does, the user's `on_save_checkpoint` included."""
        return type(connector).dump_checkpoint(connector, weights_only)

    def connect_watch(self) -> None:
        """Let the engine's communicator write its progress to the memory that the watch reads."""
        if self.watch is not None and self._communicator is not None:
            self._communicator.exchange_log.progress = self.watch.position.progress
            self.watch.unit_name, self.watch.communicator = self._unit_name, self._communicator

    def write_activity(self, activity: Activity = Activity.BETWEEN) -> None:
        """Write what this rank does from now on, between calls that write what they do."""
        if self.watch is not None:
            self.watch.position.activity = activity

    def _unit_name(self, index: int) -> str:
        units = self.engine.units if self.engine is not None else []
        return units[index].name if index < len(units) else str(index)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._has_ended = False

    def end_together(self) -> None:
        """Wait for the other ranks at the end of training; collective.

        Raises:
            DivergenceError: a rank has more batches than another and still trains; raised on all
                ranks.
        """
        if not self._has_ended:
            self._has_ended = True
            if self.engine is not None:
                self.engine.wait_for_host()  # the last step may have failed on the host
            # hazard: another rank may still train; the label END makes that an error of both.
            self._wait_for_all(Meeting.END)
            if self.engine is not None:
                compare_notes(self.engine.collectives)

    def stop_watch(self) -> None:
        """Stop the watch, as the run is over on this rank."""
        if self.watch is not None:
            self.watch.stop()
            self.watch = None

    def can_save_after(self, exception: BaseException) -> bool:
        """Return whether all ranks end with such an error at this place and can save together.

        The call waits for the other ranks up to two seconds.
        """
        # A forward may have written other values to the shards of each rank.
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
            self.watch.report_error(exception)


def _end_run(loop: _FitLoop) -> None:
    strategy = loop.trainer.strategy
    assert isinstance(strategy, WatchedStrategy)
    strategy.end_together()
    type(loop).on_run_end(loop)
