"""`GraphRanks`: decisions of all ranks. A part that one cannot capture runs eagerly on all."""

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
    """A part of the training with graphs of its own: an optimizer's update or a module.

    Attributes:
        kind: the word for such a part in messages.
        problems: why this rank cannot capture it; empty again once all ranks know.
    """

    kind: str
    problems: list[str]

    def stop_capturing(self) -> None:
        """Run eagerly from now on."""


class GraphRanks:
    """Exchanges between all ranks about captures. Each of its methods is collective.

    Args:
        trainer: the trainer of the run.
        strict: raise an error where something cannot be captured, instead of going on eagerly.
    """

    def __init__(self, trainer: Trainer, strict: bool) -> None:
        strategy, engine = trainer.strategy, getattr(trainer.strategy, "engine", None)
        group = dist.group.WORLD if trainer.world_size > 1 else None
        self._communicator = (
            make_collectives(group, strategy.root_device) if engine is None else engine.collectives
        )
        self._has_own_communicator = engine is None
        self._size = self._communicator.world_size * self._communicator.replicas
        self._strict = strict

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the ``numbers`` of each rank, in rank order.

        The exchange runs on the host and waits for no device.

        Args:
            numbers: an equal count on each rank, each above the least int64.

        Raises:
            DivergenceError: another rank of `zero3` has come to another exchange.
        """
        if self._size == 1:
            return [list(numbers)]
        # `agree` returns the maximum over ranks; each rank fills in its own row only.
        rows = torch.full((self._size, len(numbers)), _LEAST, dtype=torch.int64, device="cpu")
        rows[self._communicator.global_rank] = torch.tensor(numbers, device="cpu")
        gathered = self._communicator.agree(rows.view(-1), Meeting.GRAPHS).view(rows.shape).tolist()
        if self._has_own_communicator:
            # Without an engine no code compares the log of exchanges, or empties it.
            self._communicator.exchange_log.suspend_trace()
        return gathered

    def have_no_problems(self, problems: Sequence[object]) -> bool:
        """Return whether no rank has ``problems``."""
        return self.gather_numbers([bool(problems)]) == [[0]] * self._size

    def report_problems(self, subject: str, problems: Sequence[object]) -> None:
        """Warn once, on rank 0, that ``subject`` cannot be captured.

        Args:
            subject: the part of the training that cannot be captured.
            problems: the reasons that this rank knows. The message has those of the first rank that
                knows any; one rank at least must.

        Raises:
            GraphCaptureError: with ``strict``, on all ranks.
        """
        gathered = self._communicator.all_gather_object(list(map(str, problems)))
        rank, found = next((rank, found) for rank, found in enumerate(gathered) if found)
        where = "" if all(gathered) else f" on rank {rank}"
        text = f"CUDAGraphStep: {subject} cannot be captured{where}:\n" + "\n".join(
            f"  - {problem}" for problem in found
        )
        if self._strict:
            raise GraphCaptureError(text)
        rank_zero_warn(
            f"{text}\nIt runs without a graph on all ranks. `CUDAGraphStep(strict=True)` makes this"
            " an error."
        )

    def stop_parts(self, parts: Sequence[Part], problem_flags: Iterable[Sequence[int]]) -> None:
        """Stop capturing each part that one rank cannot capture, and report it.

        Args:
            parts: the parts, in the same order on all ranks.
            problem_flags: for each part, one flag per rank: whether the rank has problems with it.

        Raises:
            GraphCaptureError: with ``strict``, on all ranks.
        """
        for part, flags in zip(parts, problem_flags, strict=True):
            if any(flags):
                problems, part.problems = part.problems, []
                part.stop_capturing()
                self.report_problems(part.kind, problems)
