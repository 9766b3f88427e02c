"""What needs no other room: collector, heap, stacks, random states, profiler ranges, text."""

from .gc_pause import without_collection
from .heap import give_back_memory
from .printing import printable
from .profiling import profile_range

__all__ = ["give_back_memory", "printable", "profile_range", "without_collection"]
