"""How ranks exchange tensors: one communicator, within a machine, between machines, on devices.

communicator
    the object through which all exchanges of an engine go; tests and timers replace its methods
label
    a number that says which exchange this is; ranks that meet with different labels have diverged
exchange log
    what one rank has exchanged, written, read and stepped with since the ranks last agreed
trace
    the labels of the exchange log
shared flags
    memory of one machine in which each rank posts the number of the exchange that it has reached
"""

from .exchange_log import (
    LOOK_FOR,
    DivergenceError,
    ExchangeLog,
    Meeting,
    Setting,
    digest,
    first_difference,
    require_same_settings,
    require_same_values,
)
from .factory import make_collectives, make_hybrid_collectives
from .process_group import (
    ComparedCollectives,
    GroupCollectives,
    LocalCollectives,
    Pending,
    Work,
)
from .rounding import ROOM, narrow, widen
from .shared_memory import SharedMemoryCollectives

__all__ = [
    "LOOK_FOR",
    "ROOM",
    "ComparedCollectives",
    "ExchangeLog",
    "DivergenceError",
    "GroupCollectives",
    "LocalCollectives",
    "Meeting",
    "Pending",
    "Setting",
    "SharedMemoryCollectives",
    "Work",
    "digest",
    "first_difference",
    "make_collectives",
    "make_hybrid_collectives",
    "narrow",
    "require_same_settings",
    "require_same_values",
    "widen",
]
