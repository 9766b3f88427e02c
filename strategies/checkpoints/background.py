"""Saving in the background: a thread writes a copy of this rank's shards while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from .regions import ParallelSave
    from .writer import ShardedSave


class BackgroundSave:
    """Keep at most one save in flight, so that at most one copy of the shards exists."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "zero3-checkpoint")
        self._group: dist.ProcessGroup | None = None
        self._save: Future[None] | None = None  # in flight
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_running(self) -> bool:
        """Whether :meth:`wait` has not been called since the last :meth:`start`."""
        return self._save is not None

    def start(self, save: ParallelSave | ShardedSave) -> None:
        """Copy this rank's part and begin to write it; collective.

        :meth:`wait` must have been called for the save before.
        """
        assert self._save is None
        if self._group is None and dist.is_initialized():
            # hazard: the thread's exchanges would mix with the training's in the same group
            self._group = dist.new_group(backend="gloo")
        save.copy_to_cpu()
        self._save = self._thread.submit(save.write, self._group)

    def is_finished(self) -> bool:
        """Return whether the save in flight has ended on this rank; local."""
        return self._save is not None and self._save.done()

    def wait(self) -> None:
        """Wait for the save in flight, then run the callbacks of :meth:`call_after_save`.

        Raises:
            CheckpointError: the save failed, on all ranks; the callbacks are dropped.
        """
        save, self._save = self._save, None
        callbacks, self._callbacks = self._callbacks, []
        if save is not None:
            save.result()
        # hazard: before the save is complete, they would delete or unlink the only complete one
        for callback in callbacks:
            callback()

    def close(self) -> None:
        """End the thread and the group, once no save is in flight; local."""
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def call_after_save(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` once no save is in flight: to delete or link checkpoints."""
        if self.is_running:
            self._callbacks.append(callback)
        else:
            callback()
