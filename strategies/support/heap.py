"""Memory of the C library's heap."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def give_back_memory() -> None:
    """Let malloc return what was freed to the system; a C library without that keeps it."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
