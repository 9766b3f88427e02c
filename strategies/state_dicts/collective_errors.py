"""Errors that all ranks raise together: none goes on, and none waits for one that has stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; raised on all ranks."""


_alone = ContextVar("_alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """What is inside is done by this process, whatever others of a run do meanwhile."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank, and how many work together."""
    return (
        (dist.get_rank(), dist.get_world_size())
        if dist.is_initialized() and not _alone.get()
        else (0, 1)
    )


def together(doing: str, work: Callable[[], T]) -> list[T]:
    """Do this rank's part of some work; collective.

    Args:
        doing: for the error: "Saving /a/b.ckpt".
        work: local.

    Returns:
        what each rank's work returned.

    Raises:
        CheckpointError: on all ranks, when any failed; it names the first of them.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    everyone: list[Any] = [(result, describe(error))]
    if rank_and_world_size()[1] > 1:
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (result, describe(error)))
    for rank, (_, found) in enumerate(everyone):
        if found is not None:
            where = f" on rank {rank}" if len(everyone) > 1 else ""
            raise CheckpointError(f"{doing} failed{where}: {found}") from error
    return [found for found, _ in everyone]


def describe(error: BaseException | None) -> str | None:
    """What to say of an error; an own one names its place already."""
    if error is None:
        return None
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
