"""Callbacks for memory and speed, which load when they are first used.

So `allocator_early` can run before torch is imported. Callbacks with `Config` in their name change
settings and say how; `CUDAGraphStep` replays steps; `ModelExport` writes files; the others observe
alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .allocator.config import AllocatorConfig
    from .allocator.pluggable import PluggableAllocator
    from .cuda_backend import CUDABackendConfig
    from .export.callback import ModelExport
    from .graphs.callback import CUDAGraphStep
    from .memory.tracker import CUDAMemoryTracker
    from .timing.step_timer import StepTimer

# name of a callback -> its module
_MODULE_OF = {
    "AllocatorConfig": "allocator.config",
    "CUDABackendConfig": "cuda_backend",
    "CUDAGraphStep": "graphs.callback",
    "CUDAMemoryTracker": "memory.tracker",
    "ModelExport": "export.callback",
    "PluggableAllocator": "allocator.pluggable",
    "StepTimer": "timing.step_timer",
}
# Modules whose `KEYS` are the keys that a callback logs.
_MODULES = {"memory_figures": "memory.figures", "step_timer": "timing.step_timer"}
__all__ = [
    "AllocatorConfig",
    "CUDABackendConfig",
    "CUDAGraphStep",
    "CUDAMemoryTracker",
    "ModelExport",
    "PluggableAllocator",
    "StepTimer",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{_MODULES[name]}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
