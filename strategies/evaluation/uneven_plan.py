"""Evaluation on ranks with different numbers of batches: who still runs, and who helps. Integers
only.

A forward of a sharded model gathers its units, for which all ranks must be there. A rank that has
fewer batches than another therefore joins the gathers of the others for as many steps as it is
short.
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
        lacking: with it ends a loader, or a step, of which some ranks have no batch at all.
    """

    joint: bool = False
    assist: int = 0
    lacking: bool = False


def plan_turns(everyone: Sequence[int], rank: int) -> list[Turn]:
    """What this rank does with one loader.

    Args:
        everyone: batches of each rank; one that has none is handed a `NoBatch`, for which it has a
            turn too.
        rank: this rank.
    """
    mine, least, most = everyone[rank], min(everyone), max(everyone)
    if mine == 0:
        return [Turn(assist=most, lacking=True)] if most else []
    turns = [Turn(joint=step >= least) for step in range(mine)]
    turns[-1] = Turn(turns[-1].joint, most - mine, lacking=least == 0)
    return turns
