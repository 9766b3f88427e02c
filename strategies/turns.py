"""Evaluation on ranks with different numbers of batches: who still runs, and who helps. Integers only.

A forward of a sharded model gathers its units, for which all ranks must be there. A rank that has fewer batches than
another therefore joins the gathers of the others for as many steps as it is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One evaluation step of this rank.

    Attributes:
        joint: a rank that has run out takes part, and has to be told what is gathered.
        assist: steps of other ranks to take part in after this one.
    """

    joint: bool
    assist: int


def plan_turns(counts: Sequence[Sequence[int]], rank: int) -> tuple[int, list[Turn]]:
    """What this rank does in one evaluation run.

    Args:
        counts: batches of each loader (inner) on each rank (outer); loaders run one after another.
        rank: this rank.

    Returns:
        Steps to assist in before the first of this rank's own, and its turns in order.
    """
    before, turns = 0, []
    for loader, mine in enumerate(counts[rank]):
        everyone = [theirs[loader] for theirs in counts]
        least, most = min(everyone), max(everyone)
        own = [Turn(joint=step >= least, assist=0) for step in range(mine)]
        if own:
            own[-1] = Turn(own[-1].joint, most - mine)
        elif turns:
            turns[-1] = Turn(turns[-1].joint, turns[-1].assist + most)
        else:
            before += most
        turns += own
    return before, turns
