"""ZeRO-3 for PyTorch Lightning: after this import, `Trainer(strategy="zero3")` works.

The import registers the strategy and does nothing else: no CUDA, no threads, no processes.
"""

from .strategies import CheckpointOptions, DataOptions, WatchOptions, Zero3Strategy

__version__ = "0.1.0"

__all__ = ["CheckpointOptions", "DataOptions", "WatchOptions", "Zero3Strategy", "__version__"]
