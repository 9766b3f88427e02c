"""Which communicator a run has, and the one that sends no messages: memory of one machine.

shared flags
    memory of one machine in which each rank posts the number of the exchange that it has reached
"""

from .factory import make_collectives, make_hybrid_collectives
from .shared_memory import SharedMemoryCollectives

__all__ = ["SharedMemoryCollectives", "make_collectives", "make_hybrid_collectives"]
