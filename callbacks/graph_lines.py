"""Which line of the user's program is running."""

from __future__ import annotations

import linecache
import sys
from types import FrameType

# Their code runs on behalf of the user's.
_LIBRARIES = {"torch", "torchmetrics", "lightning", "lightning_utilities", "lightning_zero3", "contextlib", "functools"}


def user_line(frame: FrameType | None = None) -> tuple[str, int] | None:
    """File and line of the innermost frame (from ``frame`` outwards) that belongs to no library; None in a backward."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in _LIBRARIES:
            return frame.f_code.co_filename, frame.f_lineno
        if name in ("lightning_zero3.callbacks.graph_runner", "lightning_zero3.callbacks.graph_step"):
            return None
        frame = frame.f_back
    return None


# Modules that never call a user's code.
_ENGINE = {
    f"lightning_zero3.strategies.engine.{name}" for name in ("unit", "reduce", "collectives", "shared", "hybrid", "wire")
}


def runs_engine(frame: FrameType | None = None) -> bool:
    """Whether the code that runs is what the engine of `zero3` does by itself, differently from step to step."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name in _ENGINE:
            return True
        if name.partition(".")[0] not in _LIBRARIES:
            return False
        frame = frame.f_back
    return False


def describe_line(place: tuple[str, int] | None) -> str:
    """``train.py:31: `x = loss.item()` ``, or where else it is."""
    if place is None:
        return "in the backward pass, or in a library"
    source = linecache.getline(*place).strip()
    return f"{place[0]}:{place[1]}" + (f": `{source}`" if source else "")
