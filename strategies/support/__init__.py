"""What needs no other room: collector, heap, stacks, random states, profiler ranges, texts."""

from .byte_sizes import parse_size
from .gc_pause import without_collection
from .heap import give_back_memory
from .printing import printable
from .profiling import profile_range
from .random_states import capture as capture_random_states
from .random_states import restore as restore_random_states
from .torch_internals import (
    NO_GRAPH_TASK,
    ArchiveReader,
    AutoDispatchBelowAutograd,
    DisableAutocast,
    DisableTorchFunctionSubclass,
    attach_out_of_memory_observer,
    clear_cublas_workspaces,
    graph_task,
    set_allocator_settings,
    without_versions,
)

__all__ = [
    "ArchiveReader",
    "AutoDispatchBelowAutograd",
    "DisableAutocast",
    "DisableTorchFunctionSubclass",
    "NO_GRAPH_TASK",
    "attach_out_of_memory_observer",
    "clear_cublas_workspaces",
    "graph_task",
    "set_allocator_settings",
    "without_versions",
    "capture_random_states",
    "give_back_memory",
    "parse_size",
    "printable",
    "profile_range",
    "restore_random_states",
    "without_collection",
]
