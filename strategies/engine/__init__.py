"""The ZeRO-3 engine, in plain torch.

unit
    modules whose parameters are unsharded, used and resharded together
chunk
    parameters of a unit of the same dtypes, all trained or all frozen, laid end to end and padded
    to equal shards
shard
    this rank's contiguous 1/N of a chunk
stand-in
    what an optimizer steps on in the place of a parameter: usually its part of this rank's shard;
    for other optimizers a whole parameter, on the rank that owns it
entry
    what the engine knows of one parameter
step
    what a ``with engine.step()`` encloses: one `training_step`, or one of an evaluation; a step of
    an optimizer is an `OptimizerStep`
buffer
    the full-size memory that a unit is unsharded into: its own place in the pool, or for once
    another one. It has a storage of its own, for which torch counts how many tensors view it
pool
    the memory of all units' own buffers, where units that are not used one after the other overlap
unshard, reshard
    fill the buffer from all ranks' shards; give it up to another unit
offload
    keep shards in host memory, from which they are copied as units are unsharded
reduce
    sum a unit's gradients over ranks into the shards' (reduce-scatter, mean)
sharded
    the state of a parameter outside its unit's use: it has no memory

Read layout, partition, chunk and unit for what there is; engine, hooks, saved_tensors, backward,
reduction, gradients and stepping for what happens in a step; sharded and access for what is read
and written outside of a unit's use. The others can wait: build (set-up), buffers, agreement (what
the ranks compare), offload (shards in host memory), and the small ones: norms, forward_order,
isolation, torch_functions, streams, module_tree.
"""

from .access import gathered
from .agreement import compare_notes
from .chunk import Chunk, Entry
from .engine import Zero3Engine
from .offload import HostChunk, Offload, OffloadKind
from .partition import UnitPolicy, find_units
from .sharded import ResidencyError, ShardedParameter, is_sharded, owner_or_none
from .stepping import SCALARS, OptimizerStep, StandIns, State
from .torch_functions import instances
from .unit import Exchange, Phase, Unit, is_in_buffer

__all__ = [
    "SCALARS",
    "Chunk",
    "Entry",
    "Exchange",
    "HostChunk",
    "Offload",
    "OffloadKind",
    "OptimizerStep",
    "Phase",
    "ResidencyError",
    "ShardedParameter",
    "StandIns",
    "State",
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
]
