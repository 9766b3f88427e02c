"""What needs no other room: collector, heap, stacks, random states, profiler ranges, texts."""

from .byte_sizes import parse_size
from .gc_pause import without_collection
from .heap import give_back_memory
from .printing import printable
from .profiling import profile_range
from .random_states import capture as capture_random_states
from .random_states import restore as restore_random_states

__all__ = [
    "capture_random_states",
    "give_back_memory",
    "parse_size",
    "printable",
    "profile_range",
    "restore_random_states",
    "without_collection",
]
