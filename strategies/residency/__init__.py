"""What may be done with a tensor whose values are elsewhere: right or loud. Plain torch, and nothing of the engine.

====================  ==================================================================================================
home                  who owns a sharded parameter, and gathers or stores its values when asked to
resting               the state of a parameter outside its unit's use: every operation on it comes here first
in use                an ordinary parameter that views the gathered slot, and counts what is written to it
sharded copy          a whole gradient, whose changes its home stores, or a gathered value, which can only be read
flat gradient         this rank's shard of many gradients, as an optimizer sees them; norms of it are refused
====================  ==================================================================================================
"""

from .flat_gradient import FlatGradient
from .functions import instances
from .in_use import class_while_used
from .past_python import guard, is_gathered
from .resting import (
    NO_GRAPH_TASK,
    ResidencyError,
    RestingParameter,
    ShardedCopy,
    class_of,
    describe,
    get_grad,
    graph_task,
    home_of,
    is_aliased,
    is_sharded,
    keep_engine_last,
    note_alias,
    set_data,
    set_grad,
    settle,
    unsettle,
)

__all__ = [
    "NO_GRAPH_TASK",
    "FlatGradient",
    "ResidencyError",
    "RestingParameter",
    "ShardedCopy",
    "class_of",
    "class_while_used",
    "describe",
    "get_grad",
    "graph_task",
    "guard",
    "home_of",
    "instances",
    "is_aliased",
    "is_gathered",
    "is_sharded",
    "keep_engine_last",
    "note_alias",
    "set_data",
    "set_grad",
    "settle",
    "unsettle",
]
