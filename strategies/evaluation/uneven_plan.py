"""Plans which ranks run an evaluation step and which assist, in integers only.

A forward of a sharded model gathers its units, and all ranks must take part in that. A rank that
has fewer batches than another therefore joins the gathers of the others, for as many steps as it
has fewer batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One evaluation step of this rank.

    Attributes:
        is_uneven: a rank without a batch assists, so this rank announces what it gathers.
        assisted_steps: number of steps of other ranks in which this one takes part after its own.
        has_empty_rank: some rank has no batch at all of a loader that ends with this step, or of
            this step.
    """

    is_uneven: bool = False
    assisted_steps: int = 0
    has_empty_rank: bool = False


def plan_turns(counts: Sequence[int], rank: int) -> list[Turn]:
    """Return the turns of ``rank`` with one loader.

    Args:
        counts: number of batches of each rank. A rank that has none is handed a `NoBatch`, for
            which it has one turn.
        rank: this rank.
    """
    mine, least, most = counts[rank], min(counts), max(counts)
    if mine == 0:
        return [Turn(assisted_steps=most, has_empty_rank=True)] if most else []
    turns = [Turn(is_uneven=step >= least) for step in range(mine)]
    turns[-1] = Turn(turns[-1].is_uneven, most - mine, has_empty_rank=least == 0)
    return turns
