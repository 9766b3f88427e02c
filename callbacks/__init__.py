"""Callbacks for memory and speed. They observe; those with `Config` in their name act, and say how.

The names load when they are first used, so that `allocator_early` can run before anything else.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allocator.config import AllocatorConfig
    from .allocator.pluggable import PluggableAllocator
    from .cuda_backend import CUDABackendConfig
    from .graphs.callback import CUDAGraphStep
    from .memory.tracker import CUDAMemoryTracker
    from .timing.step_timer import StepTimer

_HOMES = {
    "AllocatorConfig": "allocator.config",
    "CUDABackendConfig": "cuda_backend",
    "CUDAGraphStep": "graphs.callback",
    "CUDAMemoryTracker": "memory.tracker",
    "PluggableAllocator": "allocator.pluggable",
    "StepTimer": "timing.step_timer",
}
# Modules whose `KEYS` list what a callback logs.
_MODULES = {"memory_figures": "memory.figures", "step_timer": "timing.step_timer"}
__all__ = [
    "AllocatorConfig",
    "CUDABackendConfig",
    "CUDAGraphStep",
    "CUDAMemoryTracker",
    "PluggableAllocator",
    "StepTimer",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{_MODULES[name]}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
