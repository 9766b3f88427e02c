"""What needs no other room: collector pauses, thread stacks, random states, profiler ranges."""

from .gc_pause import without_collection
from .profiling import profile_range

__all__ = ["profile_range", "without_collection"]
