"""Saving in the background: a thread writes a copy of this rank's shards while training goes on.

The thread is the one of ``torch.distributed.checkpoint.async_save``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:  # importing torch.distributed.checkpoint is slow
    from .writer import Prepared


class BackgroundSave:
    """Keep at most one save in flight, so that at most one copy of the shards exists."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._save: tuple[Path, Future[Any]] | None = None  # in flight
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_running(self) -> bool:
        """Whether :meth:`wait` has not been called since the last :meth:`start`."""
        return self._save is not None

    def start(self, prepared: Prepared) -> None:
        """Copy this rank's part and begin to write it; collective.

        :meth:`wait` must have been called for the save before.
        """
        from .writer import save_copies

        assert self._save is None
        if self._group is None and dist.is_initialized():
            # hazard: the thread's exchanges would mix with the training's in the same group
            self._group = dist.new_group(backend="gloo")
        self._save = prepared.path, save_copies(prepared, self._group)

    def is_finished(self) -> bool:
        """Return whether the save in flight has ended on this rank; local."""
        return self._save is not None and self._save[1].done()

    def wait(self) -> None:
        """Wait for the save in flight, then run the callbacks of :meth:`call_after_save`.

        Raises:
            CheckpointError: the save failed, on all ranks; the callbacks are dropped.
        """
        from .writer import saving

        save, self._save = self._save, None
        callbacks, self._callbacks = self._callbacks, []
        if save is not None:
            path, future = save
            with saving(path):
                future.result()
        # hazard: before the save is complete, they would delete or unlink the only complete one
        for callback in callbacks:
            callback()

    def call_after_save(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` once the save in flight is complete: to delete or link checkpoints."""
        self._callbacks.append(callback)
