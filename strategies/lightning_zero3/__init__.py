"""ZeRO-3 for PyTorch Lightning: after this import, `Trainer(strategy="zero3")` works.

The import registers the strategy and does nothing else: no CUDA, no threads, no processes.
"""

try:
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
except ValueError as error:
    # `lightning.fabric.utilities.rank_zero._get_rank` runs while Lightning is imported, and reads
    # the first of these variables that is set.
    from os import environ

    assignments = [
        f"{name}={environ[name]!r}"
        for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
        if name in environ
    ]
    if not assignments or not str(error).startswith("invalid literal for int()"):
        raise
    raise RuntimeError(f"{assignments[0]} is not a whole number. Correct or unset it.") from error

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
