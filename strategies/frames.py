"""What the threads of this process run."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
_READING = threading.RLock()  # a signal's handler may ask in the middle


def read_frames(read: Callable[[dict[int, FrameType]], T]) -> T:
    """Call ``read`` with the frame that each thread runs, by the thread's ``ident``; it keeps none of them.

    Nobody collects garbage meanwhile. Up to CPython 3.11 listing frames and ``f_back`` may start a collection; where a
    finalizer lets other threads run, these lock up (python/cpython#106883) or leave the frame that is being read, whose
    memory then is another's.
    """
    with _READING:  # two of them would not agree on who lets garbage be collected again
        if collects := gc.isenabled():  # else another thread that lets it go on, just now, would be undone for ever
            gc.disable()
        try:
            return read(sys._current_frames())
        finally:
            if collects:
                gc.enable()
