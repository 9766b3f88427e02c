"""A safe way to read the stacks of this process's threads."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from .gc_pause import without_collection

T = TypeVar("T")


def read_frames(read: Callable[[dict[int, FrameType]], T]) -> T:
    """Return what ``read`` returns for the frames that threads run, by the threads' ``ident``.

    ``read`` must keep no frame. hazard: up to CPython 3.11 listing frames and ``f_back`` may start
    a garbage collection; if a finalizer then lets other threads run, they lock up
    (python/cpython#106883) or leave the frame that ``read`` looks at, whose memory is used again.
    So the collector is off meanwhile.
    """
    with without_collection():
        return read(sys._current_frames())
