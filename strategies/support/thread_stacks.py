"""What the threads of this process run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from .gc_pause import without_collection

T = TypeVar("T")


def read_frames(read: Callable[[dict[int, FrameType]], T]) -> T:
    """Call ``read`` with the frame that each thread runs, by the thread's ``ident``; it keeps none
    of them.

    Nobody collects garbage meanwhile. Up to CPython 3.11 listing frames and ``f_back`` may start a
    collection; where a finalizer lets other threads run, these lock up (python/cpython#106883) or
    leave the frame that is being read, whose memory then is another's.
    """
    with without_collection():
        return read(sys._current_frames())
