"""Autograd's runs: the one function that all ways to a backward call, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from threading import get_ident
from typing import Any
from weakref import ref

import torch

from ..residency.resting import NO_GRAPH_TASK, graph_task
from .hooks import transform
from .saved_tensors import run_watched


class Run:
    """One that is not inside of another (of a re-entrant checkpoint), nor of torch.func, nor of
    what torch.compile traces.

    Attributes:
        accumulates: it adds to ``parameter.grad``; ``torch.autograd.grad`` does not.
        runners: that have joined.
    """

    def __init__(self, accumulates: bool) -> None:
        self.accumulates, self.runners = accumulates, list[Any]()


_RUNNING: dict[int, Run] = {}  # by the thread that has begun it
_RUNNERS: list[ref[Any]] = []  # each a `backward.Backward`
WAITING: list[ref[Any]] = []  # to be told before a run begins; in the same order on all ranks


def watch_runs(runner: Any) -> ref[Any]:
    """Tell ``runner`` of runs for as long as it lives. Returns what may be put in ``WAITING``."""
    for runners in (_RUNNERS, WAITING):
        runners[:] = [there for there in runners if there() is not None]
    _RUNNERS.append(ref(runner))
    _wrap()
    return _RUNNERS[-1]


def ignore_runs(told: ref[Any]) -> None:
    """Tell it of no more."""
    for runners in (_RUNNERS, WAITING):
        runners[:] = [there for there in runners if there is not told]


def current_run(stepping: int) -> Run | None:
    """In which a hook is called: this thread's; in one of a device's threads that of ``stepping``,
    or the only one there is.
    """
    here = get_ident()
    if here in _RUNNING or here == stepping:
        return _RUNNING.get(here)
    return _RUNNING.get(stepping) or (next(iter(_RUNNING.values())) if len(_RUNNING) == 1 else None)


@cache
def _wrap() -> None:
    # Both: torch.compiler puts the second one in the place of the first.
    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = _told(
        torch.autograd._engine_run_backward
    )


def _told(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run_backward)
    def run_told(*args: Any, **kwargs: Any) -> Any:
        # by torch.compile
        traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if graph_task() != NO_GRAPH_TASK or transform() is not None or traced:
            return run_watched(run_backward, *args, **kwargs)
        here, run = get_ident(), Run(kwargs.get("accumulate_grad", True))
        # outer: this one is a finalizer's, or a signal handler's
        outer, _RUNNING[here] = (
            _RUNNING.get(here),
            run,
        )
        try:
            for there in tuple(WAITING):
                if (runner := there()) is not None:
                    runner.before_run(run)
            result = run_watched(run_backward, *args, **kwargs)
            for runner in run.runners:
                runner.after_run()
        except BaseException:
            for there in tuple(_RUNNERS):
                if (runner := there()) is not None:
                    runner.fail_run(run)
            raise
        finally:
            del _RUNNING[here]
            if outer is not None:
                _RUNNING[here] = outer
        return result

    return run_told
