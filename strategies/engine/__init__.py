"""The ZeRO-3 engine, in plain torch.

unit
    modules whose parameters are gathered, used and released together
chunk
    one flat buffer of a unit's parameters of the same dtypes, all trained or all frozen, padded to
    equal shards
shard
    this rank's contiguous 1/N of a chunk
piece
    the part of a shard that belongs to one optimizer group
flat tensor
    this rank's pieces of one optimizer group, end to end; what the optimizer steps on
arena
    the memory of all slots; it knows which units hold which part
slot
    the full-size place in the arena that a unit is gathered into. It has a storage of its own, for
    which torch counts how many tensors view it; its parameters do
gather, release
    fill the slot from all ranks' shards; give its memory up to another unit
reduce
    sum a unit's gradients over ranks into the flat gradients (reduce-scatter, mean)
resting
    the state of a parameter outside its unit's use
visit
    a unit's turn in backward

Read layout, partition, shards, chunk and unit for what there is; engine, hooks, runs,
saved_tensors, backward, reduction and gradients for what happens in a step; access for what is read
and written outside of a unit's use. The others can wait: build (set-up), buffers, held_gradients,
kept_views (views of weights that outlive their use), agreement (what the ranks compare), uneven
(steps that some ranks do not run), one_rank, debug, graph_replay (what a captured graph does to
units), memory_ledger, transforms (torch.func), lifted (full precision where autocast is off), and
the small ones: clearing, huge_pages, forward_order, segments, streams, module_tree.
"""

from ..residency import (
    ResidencyError,
    RestingParameter,
    home_of,
    instances,
    is_gathered,
    is_sharded,
    show,
    unguarded,
)
from .access import gathered
from .agreement import compare_notes
from .engine import Zero3Engine
from .graph_replay import ReplayedStep, unit_around
from .partition import UnitPolicy, find_units
from .unit import Unit

__all__ = [
    "ReplayedStep",
    "ResidencyError",
    "RestingParameter",
    "Unit",
    "UnitPolicy",
    "Zero3Engine",
    "compare_notes",
    "find_units",
    "gathered",
    "home_of",
    "instances",
    "is_gathered",
    "is_sharded",
    "show",
    "unguarded",
    "unit_around",
]
