"""The ranks of a run, which decide together: what one of them cannot capture runs eagerly on
all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from ...strategies.collectives import Meeting, make_collectives
from .preconditions import GraphCaptureError

_LEAST = torch.iinfo(torch.int64).min


class Part(Protocol):
    """Something with graphs of its own.

    Attributes:
        kind: what it is, for messages.
        problems: why it cannot be captured, until all ranks have heard of it.
    """

    kind: str
    problems: list[str]

    def refuse(self) -> None:
        """From now on it runs eagerly."""


class GraphRanks:
    """All ranks; each of its methods is to be called by all of them.

    Args:
        trainer: that trains.
        strict: raise where something cannot be captured, instead of going on eagerly.
    """

    def __init__(self, trainer: Trainer, strict: bool) -> None:
        strategy, engine = trainer.strategy, getattr(trainer.strategy, "engine", None)
        everyone = dist.group.WORLD if trainer.world_size > 1 else None
        self._communicator = (
            make_collectives(everyone, strategy.root_device)
            if engine is None
            else engine.collectives
        )
        self._own_communicator = engine is None
        self._size, self._strict = (
            self._communicator.world_size * self._communicator.replicas,
            strict,
        )

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """``numbers`` of each rank, in rank order; on the host, so that no device is waited for.

        Args:
            numbers: as many on each rank.

        Raises:
            DivergenceError: another rank of zero3 has come to something else.
        """
        if self._size == 1:
            return [list(numbers)]
        rows = torch.full((self._size, len(numbers)), _LEAST, dtype=torch.int64, device="cpu")
        rows[self._communicator.global_rank] = torch.tensor(numbers, device="cpu")
        everyone = self._communicator.agree(rows.view(-1), Meeting.GRAPHS).view(rows.shape).tolist()
        if self._own_communicator:
            # where there is no engine nobody compares what was exchanged, or forgets it
            self._communicator.exchange_log.forget()
        return everyone

    def have_none(self, problems: Sequence[object]) -> bool:
        """Whether no rank has ``problems``."""
        return not any(mine for [mine] in self.gather([bool(problems)]))

    def report(self, what: str, problems: Sequence[object]) -> None:
        """Warn, once for all ranks.

        Args:
            what: cannot be captured.
            problems: why, as far as this rank knows; the first rank that does is quoted.

        Raises:
            GraphCaptureError: with ``strict``, on all ranks.
        """
        everyone = self._communicator.all_gather_object(list(map(str, problems)))
        rank, found = next((rank, found) for rank, found in enumerate(everyone) if found)
        where = "" if all(everyone) else f" on rank {rank}"
        text = f"CUDAGraphStep: {what} cannot be captured{where}:\n" + "\n".join(
            f"  - {problem}" for problem in found
        )
        if self._strict:
            raise GraphCaptureError(text)
        rank_zero_warn(
            f"{text}\nIt runs without a graph on all ranks. `CUDAGraphStep(strict=True)` makes this"
            " an error."
        )

    def refuse(self, parts: Sequence[Part], refusing: Iterable[Sequence[int]]) -> None:
        """What one rank refuses is refused by all.

        Args:
            refusing: for each of ``parts``: of each rank, whether it has problems with it.

        Raises:
            GraphCaptureError: with ``strict``, on all ranks.
        """
        for part, flags in zip(parts, refusing, strict=True):
            if any(flags):
                problems, part.problems = part.problems, []
                part.refuse()
                self.report(part.kind, problems)
