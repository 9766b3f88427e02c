"""Saving while training goes on: a copy of this rank's shards is written by a thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

from .storage import remove


class BackgroundSave:
    """At most one save in flight, so that at most one copy of the shards exists."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "zero3-save")
        self._group: dist.ProcessGroup | None = None
        self._running: Future[None] | None = None
        self._superseded: list[Path] = []  # to be removed when the one in flight is whole

    @property
    def running(self) -> bool:
        """Whether a save has been started and its end was not looked at."""
        return self._running is not None

    def start(self, save: Callable[[dist.ProcessGroup | None], None]) -> None:
        """Run ``save`` in the thread, with a process group of its own; collective. The one before must have been waited for."""
        assert self._running is None
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")  # the training's own collectives go on meanwhile
        self._running = self._executor.submit(save, self._group)

    def finished(self) -> bool:
        """Whether the save in flight has ended on this rank; local."""
        return self._running is not None and self._running.done()

    def wait(self) -> None:
        """Wait for the save in flight; what it replaces is removed then.

        Raises:
            CheckpointError: it failed, on all ranks.
        """
        running, self._running = self._running, None
        superseded, self._superseded = self._superseded, []
        if running is not None:
            running.result()
        for path in superseded:
            remove(path)

    def remove_later(self, path: Path) -> None:
        """Delete ``path`` once the save in flight, which may be meant to replace it, is whole."""
        self._superseded.append(path)

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown()
