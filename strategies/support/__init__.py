"""What needs no other room: collector pauses, the heap, stacks, random states, profiler ranges."""

from .gc_pause import without_collection
from .heap import give_back_memory
from .profiling import profile_range

__all__ = ["give_back_memory", "profile_range", "without_collection"]
