"""A pause of Python's garbage collector, which otherwise may run wherever an object is made."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# hazard: a signal's handler may enter while this thread has the lock, so the lock is reentrant
_lock = threading.RLock()
_pauses = 0  # blocks that threads of this process are in
_has_disabled = False  # a block found the collector enabled


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector disabled in a block, for all threads.

    Each block disables the collector again if other code has enabled it in another block. The last
    block to end enables the collector if it was enabled when any of them began.
    """
    global _pauses, _has_disabled
    with _lock:
        _pauses += 1
        if gc.isenabled():
            gc.disable()
            _has_disabled = True
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _has_disabled:
                _has_disabled = False
                gc.enable()


def _end_pauses_of_parent() -> None:
    """Enable the collector in a forked child, in which the parent's other threads do not exist."""
    global _lock, _pauses, _has_disabled
    _lock, _pauses = threading.RLock(), 0
    if _has_disabled:
        _has_disabled = False
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_pauses_of_parent)
