"""Saving in the background: a thread writes a copy of this rank's shards while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch.distributed as dist

from ..state_dicts.collective_errors import run_on_all_ranks
from ..support import profile_range

if TYPE_CHECKING:
    from .regions import ParallelSave
    from .writer import ShardedSave


class BackgroundSave:
    """Keep at most one save in flight, so that at most one copy of the shards exists."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "zero3-checkpoint")
        self._group: dist.ProcessGroup | None = None
        self._tasks: list[Future[None]] = []  # the save in flight, and what comes after it

    def start(self, save: ParallelSave | ShardedSave) -> None:
        """Copy this rank's part and begin to write it; collective.

        :meth:`wait` must have been called for the save before.
        """
        assert not self._tasks
        if self._group is None and dist.is_initialized():
            # hazard: the thread's exchanges would mix with the training's in the same group
            self._group = dist.new_group(backend="gloo")
        with save.failing(), profile_range("copy checkpoint"):
            run_on_all_ranks("Copying shards for a background save", save.copy_to_cpu)
        self._tasks = [self._thread.submit(save.write, self._group)]

    def wait(self) -> None:
        """Wait for the save in flight, and for the changes of :meth:`change_after_save`.

        Raises:
            CheckpointError: the save failed, on all ranks; the changes are dropped.
        """
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.result()

    def change_after_save(self, change: Callable[[], None]) -> None:
        """Delete or link checkpoints, once no save is in flight."""
        before = [*self._tasks]

        def call() -> None:
            # hazard: if the save fails, the change might delete or unlink the only complete one
            for task in before:
                task.result()
            change()

        self._tasks.append(self._thread.submit(call))

    def close(self) -> None:
        """Finish what is in flight, and end the thread and the group; raises as :meth:`wait`."""
        self._thread.shutdown()
        if self._group is not None:
            dist.destroy_process_group(self._group)
        self.wait()
