"""ZeRO-3 for PyTorch Lightning: after this import, `Trainer(strategy="zero3")` works.

The import registers the strategy and does nothing else: no CUDA, no threads, no processes.
"""

from .strategies import (
    CheckpointError,
    CheckpointOptions,
    DataOptions,
    DivergenceError,
    LaunchError,
    ResidencyError,
    WatchOptions,
    World,
    Zero3Strategy,
    current_world,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointOptions",
    "DataOptions",
    "DivergenceError",
    "LaunchError",
    "ResidencyError",
    "WatchOptions",
    "World",
    "Zero3Strategy",
    "__version__",
    "current_world",
]
