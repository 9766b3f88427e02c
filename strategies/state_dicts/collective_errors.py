"""Errors that all ranks raise together.

None goes on after the error of another, and none waits for a rank that has stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

from ..support import printable

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """Report that a checkpoint could not be written or read; all ranks raise it."""

    def __init__(self, message: str) -> None:
        # it may quote a file of a stranger's
        super().__init__(printable(message, kept="\n\t"))


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """Report that there is no such checkpoint, also to those who catch ``FileNotFoundError``."""


_ignores_other_ranks = ContextVar("_ignores_other_ranks", default=False)


@contextmanager
def without_other_ranks() -> Iterator[None]:
    """Let this process do the body by itself, whatever the other ranks do meanwhile.

    Inside, :func:`rank_and_world_size` answers (0, 1), so nothing is collective.
    """
    token = _ignores_other_ranks.set(True)
    try:
        yield
    finally:
        _ignores_other_ranks.reset(token)


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks that work together."""
    return (
        (dist.get_rank(), dist.get_world_size())
        if dist.is_initialized() and not _ignores_other_ranks.get()
        else (0, 1)
    )


def run_on_all_ranks(
    action: str, work: Callable[[], T], group: dist.ProcessGroup | None = None
) -> list[T]:
    """Do this rank's part of some work and wait for the other ranks' parts; collective.

    Args:
        action: what the ranks do, for the error: "Saving /a/b.ckpt".
        work: this rank's part; local.
        group: of all ranks, for the exchange; by default the one of the run.

    Returns:
        what each rank's work returned, by rank.

    Raises:
        CheckpointError: on all ranks, when the work of any failed; names the first of these ranks.
            It is a :class:`MissingCheckpointError` where that rank found no file.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    outcome = result, describe_error(error), isinstance(error, FileNotFoundError)
    outcomes: list[Any] = [outcome]
    if rank_and_world_size()[1] > 1:
        # hazard: the others wait in this exchange, so an error must not be raised before it
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome, group)
    for rank, (_, message, is_missing) in enumerate(outcomes):
        if message is not None:
            kind = MissingCheckpointError if is_missing else CheckpointError
            where = f" on rank {rank}" if len(outcomes) > 1 else ""
            raise kind(f"{action} failed{where}: {message}") from error
    return [result for result, _, _ in outcomes]


def describe_error(error: BaseException | None) -> str | None:
    """Return the text of an error with its type; a CheckpointError's text needs no type."""
    if error is None:
        return None
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
