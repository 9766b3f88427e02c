"""Saving while training goes on: torch.distributed.checkpoint's thread writes a copy of this rank's
shards.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:  # importing torch.distributed.checkpoint takes a while
    from .writer import Prepared


class BackgroundSave:
    """At most one save in flight, so that at most one copy of the shards exists."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._running: tuple[Path, Future[Any]] | None = None
        self._afterwards: list[Callable[[], None]] = []

    @property
    def running(self) -> bool:
        """Whether a save has been started and its end was not looked at."""
        return self._running is not None

    def start(self, prepared: Prepared) -> None:
        """Copy this rank's part and begin to write it; collective. The one before must have been
        waited for.
        """
        from .writer import save_copies

        assert self._running is None
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        self._running = prepared.path, save_copies(prepared, self._group)

    def finished(self) -> bool:
        """Whether the save in flight has ended on this rank; local."""
        return self._running is not None and self._running[1].done()

    def wait(self) -> None:
        """Wait for the save in flight, and do what was to be done after it.

        Raises:
            CheckpointError: it failed, on all ranks.
        """
        from .writer import saving

        running, self._running = self._running, None
        afterwards, self._afterwards = self._afterwards, []
        if running is not None:
            with saving(running[0]):
                running[1].result()
        for work in afterwards:
            work()

    def afterwards(self, work: Callable[[], None]) -> None:
        """Do ``work`` once the save in flight is whole: remove what it replaces, let links lead to
        it.
        """
        self._afterwards.append(work)
