"""Python's garbage collector, which may begin wherever an object is made."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_COUNTING = threading.RLock()  # a signal's handler may come in the middle
_inside = 0
_collects = False


@contextmanager
def without_collection() -> Iterator[None]:
    """Nobody collects garbage inside, whichever thread. Who leaves last lets it be as who came first found it."""
    global _inside, _collects
    with _COUNTING:
        if _inside == 0 and (_collects := gc.isenabled()):
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _COUNTING:
            _inside -= 1
            if _inside == 0 and _collects:
                gc.enable()
