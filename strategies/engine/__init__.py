"""The ZeRO-3 engine, in plain torch.

unit
    modules whose parameters are unsharded, used and resharded together
chunk
    parameters of a unit of the same dtypes, all trained or all frozen, laid end to end and padded
    to equal shards
shard
    this rank's contiguous 1/N of a chunk
piece
    the part of a shard that belongs to one optimizer group
flat tensor
    this rank's pieces of one optimizer group, end to end; what the optimizer steps on
buffer
    the full-size memory that a unit is unsharded into: its own place in the arena, or for once
    another one. It has a storage of its own, for which torch counts how many tensors view it
arena
    the memory of all units' own buffers, where units that are not used one after the other overlap
unshard, reshard
    fill the buffer from all ranks' shards; give it up to another unit
reduce
    sum a unit's gradients over ranks into the flat gradients (reduce-scatter, mean)
sharded
    the state of a parameter outside its unit's use: it has no memory

Read layout, partition, shards, chunk and unit for what there is; engine, hooks, saved_tensors,
backward, reduction and gradients for what happens in a step; sharded and access for what is read
and written outside of a unit's use. The others can wait: build (set-up), buffers, agreement (what
the ranks compare), uneven (steps that some ranks do not run), debug, graph_replay (what a captured
graph does to units), memory_ledger, and the small ones: forward_order, flat_gradient, isolation,
torch_functions, segments, streams, module_tree.
"""

from .access import gathered
from .agreement import compare_notes
from .engine import Zero3Engine
from .flat_gradient import unguarded
from .graph_replay import ReplayedStep, unit_around
from .partition import UnitPolicy, find_units
from .sharded import ResidencyError, ShardedParameter, is_sharded, owner_or_none
from .torch_functions import instances
from .unit import Unit, is_in_buffer

__all__ = [
    "ReplayedStep",
    "ResidencyError",
    "ShardedParameter",
    "Unit",
    "UnitPolicy",
    "Zero3Engine",
    "compare_notes",
    "find_units",
    "gathered",
    "instances",
    "is_in_buffer",
    "is_sharded",
    "owner_or_none",
    "unguarded",
    "unit_around",
]
