"""Finds lines of the user's program: the line that runs, and the line that a problem is about."""

from __future__ import annotations

import dis
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

Place = tuple[str, int] | str | None  # file and line, or a place in words
ELSEWHERE = "in the backward pass, or in a library"

# Packages whose code runs on behalf of the user's.
_LIBRARIES = {
    "torch",
    "torchmetrics",
    "lightning",
    "lightning_utilities",
    "lightning_zero3",
    "contextlib",
    "functools",
}


# Modules that call a step, or functions of a backward: frames outside of theirs do not belong to
# the user's step.
_NOBODYS = {
    "lightning_zero3.callbacks.graphs.step_runner",
    "lightning_zero3.callbacks.graphs.captured_step",
    "torch.autograd.graph",
}


def is_library(module: str) -> bool:
    """Return whether the module of this name runs on behalf of the user's code."""
    return module.partition(".")[0] in _LIBRARIES


def is_users(frame: FrameType) -> bool:
    """Return whether the code of ``frame`` belongs to no library."""
    return not is_library(frame.f_globals.get("__name__", ""))


def user_line(frame: FrameType | None = None) -> tuple[str, int] | None:
    """Return file and line of the innermost frame, from ``frame`` outwards, of no library.

    None in a backward.
    """
    found = next(user_frames(sys._getframe(1) if frame is None else frame), None)
    return None if found is None else (found.f_code.co_filename, found.f_lineno)


def user_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the user's frames of a step or of a backward's function, from ``frame`` outwards."""
    while frame is not None and frame.f_globals.get("__name__", "") not in _NOBODYS:
        if is_users(frame):
            yield frame
        frame = frame.f_back


# Modules that never call a user's code.
_ENGINE = {
    *(f"lightning_zero3.strategies.engine.{name}" for name in ("unit", "reduction", "backward")),
    *(
        f"lightning_zero3.strategies.collectives.{name}"
        for name in ("process_group", "pairwise", "shared_memory", "hybrid", "rounding")
    ),
}


def runs_engine(frame: FrameType | None = None) -> bool:
    """Return whether ``frame`` runs inside of the engine of `zero3`, before any user's code.

    The engine's own work may differ from step to step.
    """
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        if frame.f_globals.get("__name__", "") in _ENGINE:
            return True
        if is_users(frame):
            return False
        frame = frame.f_back
    return False


def definition(function: Callable[..., Any]) -> Place:
    """Return file and line where ``function`` begins, or None."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else (code.co_filename, code.co_firstlineno)


def line_of_attribute(name: str, codes: Iterable[CodeType]) -> Place:
    """Return the first line that assigns, or else mentions, an attribute or global ``name``."""
    for operations in (
        ("STORE_ATTR", "STORE_GLOBAL"),
        ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF"),
    ):
        for code in codes:
            for instruction in dis.get_instructions(code):
                if instruction.opname in operations and instruction.argval == name:
                    lines = (
                        line
                        for start, stop, line in code.co_lines()
                        if start <= instruction.offset < stop
                    )
                    return code.co_filename, next(lines, None) or code.co_firstlineno
    return None


@contextmanager
def naming_failure(what: str) -> Iterator[None]:
    """Wrap the capture of ``what``: an error names it, and the user's line that failed.

    Raises:
        RuntimeError: replaces a `RuntimeError` of the body, after which CUDA cannot go on.
    """
    try:
        yield
    except RuntimeError as error:
        cause, place = _users_error(error)
        where = f"\n    {describe_line(place)}" if place else ""
        raise RuntimeError(
            f"CUDAGraphStep: capturing {what} failed: it does something that no graph can hold and"
            " that eager steps did not show. Run without `CUDAGraphStep`, or choose the modules"
            " that are captured, `CUDAGraphStep(modules=...)`." + where
        ) from cause


def _users_error(error: BaseException) -> tuple[BaseException, Place]:
    """Return the error that a user's line raised, and the line.

    CUDA ends a capture that failed with an error of its own, of which the user's is the context.
    """
    each: BaseException | None = error
    while each is not None:
        frames = [
            (f.f_code.co_filename, line)
            for f, line in traceback.walk_tb(each.__traceback__)
            if is_users(f)
        ]
        if frames:
            return each, frames[-1]
        each = each.__context__
    return error, None


def describe_line(place: Place) -> str:
    """Return ``train.py:31: `x = loss.item()` ``, or the place in words."""
    if place is None or isinstance(place, str):
        return place or ""
    source = linecache.getline(*place).strip()
    return f"{place[0]}:{place[1]}" + (f": `{source}`" if source else "")
