"""Callbacks for memory and speed. They observe; those with `Config` in their name act, and say how.

The names load when they are first used, so that `allocator_early` can run before anything else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allocator import AllocatorConfig
    from .allocator_pluggable import PluggableAllocator
    from .cuda_backend import CUDABackendConfig
    from .cuda_graph import CUDAGraphStep
    from .memory_tracker import CUDAMemoryTracker
    from .step_timer import StepTimer

_HOMES = {
    "AllocatorConfig": "allocator",
    "CUDABackendConfig": "cuda_backend",
    "CUDAGraphStep": "cuda_graph",
    "CUDAMemoryTracker": "memory_tracker",
    "PluggableAllocator": "allocator_pluggable",
    "StepTimer": "step_timer",
}
__all__ = ["AllocatorConfig", "CUDABackendConfig", "CUDAGraphStep", "CUDAMemoryTracker", "PluggableAllocator", "StepTimer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
