"""Ranks that a process of the same host has started end with it while they wait for each other.

Later the watch finds the end of any rank. What torchrun, SLURM or mpirun started is theirs to end.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .launchers import NOTEBOOK, SPAWN, SUBPROCESS
from .world import World

PARENT_VARIABLE = "LIGHTNING_ZERO3_PARENT"  # set by the process that starts ranks as scripts
_POLL_S = 1.0


@contextmanager
def end_with_parent(world: World) -> Iterator[None]:
    """End this process if the one that started it ends during the block."""
    forker = multiprocessing.parent_process()
    if forker is not None and world.launcher in (SPAWN.name, NOTEBOOK.name):
        parent, is_alive = forker.pid, forker.is_alive
    elif world.launcher == SUBPROCESS.name and world.local_rank and PARENT_VARIABLE in os.environ:
        parent = int(os.environ[PARENT_VARIABLE])
        is_alive = lambda: os.getppid() == parent  # noqa: E731
    else:
        yield
        return
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_POLL_S):
            if not is_alive():
                print(
                    f"Rank {world.rank} ends: process {parent}, which had started it, is gone, and"
                    " not all ranks had come yet.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

    threading.Thread(target=watch, name="lightning_zero3.parent", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
