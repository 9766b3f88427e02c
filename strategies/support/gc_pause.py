"""Python's garbage collector, which may begin wherever an object is made."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_counting = threading.RLock()  # a signal's handler may come in the middle
_inside = 0
_stopped = False  # by somebody inside


@contextmanager
def without_collection() -> Iterator[None]:
    """Nobody collects garbage inside, whichever thread, and whoever let it go on meanwhile.

    Who leaves last lets it go on if it went on when anybody came.
    """
    global _inside, _stopped
    with _counting:
        _inside += 1
        if gc.isenabled():
            gc.disable()
            _stopped = True
    try:
        yield
    finally:
        with _counting:
            _inside -= 1
            if _inside == 0 and _stopped:
                _stopped = False
                gc.enable()


def _begin_anew() -> None:
    """In a process that was forked: whoever was inside, in another thread, is not here."""
    global _counting, _inside, _stopped
    _counting, _inside = threading.RLock(), 0
    if _stopped:
        _stopped = False
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
