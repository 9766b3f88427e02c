"""How ranks exchange tensors: one communicator for every exchange.

communicator
    the object through which all exchanges of an engine go; tests and timers replace its methods
label
    a number that says which exchange this is; ranks that meet with different labels have diverged
exchange log
    what one rank has exchanged, written and stepped with since the ranks last agreed
trace
    the labels of the exchange log
"""

from .exchange_log import (
    LOOK_FOR,
    DivergenceError,
    ExchangeLog,
    Meeting,
    digest,
    first_difference,
)
from .hybrid import HybridCollectives
from .process_group import (
    ComparedCollectives,
    GroupCollectives,
    LocalCollectives,
    Pending,
    Work,
)
from .rounding import ROOM, narrow

__all__ = [
    "LOOK_FOR",
    "ROOM",
    "ComparedCollectives",
    "ExchangeLog",
    "DivergenceError",
    "GroupCollectives",
    "HybridCollectives",
    "LocalCollectives",
    "Meeting",
    "Pending",
    "Work",
    "digest",
    "first_difference",
    "narrow",
]
