"""How ranks exchange tensors: one door, and what is behind it on a machine, between machines and on devices.

====================  ==================================================================================================
door                  the object that all exchanges of an engine go through; tests and timers substitute its methods
label                 number that an exchange has on all ranks: those that come with different ones have parted
trace                 labels since the ranks last agreed that they do the same
board                 memory of one machine in which each rank posts the exchange that it has come to
====================  ==================================================================================================
"""

from .compared import ComparedCollectives
from .diary import (
    ASSIGNED,
    CLEARED,
    LOOK_FOR,
    Diary,
    DivergenceError,
    Meeting,
    Setting,
    checksum,
    digest,
    first_difference,
    require_same_settings,
    require_same_values,
)
from .door import make_collectives, make_hybrid_collectives
from .group import GroupCollectives, LocalCollectives, Pending, Work
from .pairwise import PairwiseCollectives
from .shared import SharedMemoryCollectives
from .timing import CallTimer, CollectiveTimer, HostClock, make_clock
from .wire import ROOM, narrow, widen

__all__ = [
    "ASSIGNED",
    "CLEARED",
    "LOOK_FOR",
    "ROOM",
    "CallTimer",
    "CollectiveTimer",
    "ComparedCollectives",
    "Diary",
    "DivergenceError",
    "GroupCollectives",
    "HostClock",
    "LocalCollectives",
    "Meeting",
    "PairwiseCollectives",
    "Pending",
    "Setting",
    "SharedMemoryCollectives",
    "Work",
    "checksum",
    "digest",
    "first_difference",
    "make_clock",
    "make_collectives",
    "make_hybrid_collectives",
    "narrow",
    "require_same_settings",
    "require_same_values",
    "widen",
]
