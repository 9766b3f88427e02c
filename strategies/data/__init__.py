"""Loaders that give every rank its share, and continue with the next sample after a restart.

The order of samples is a function of (seed, epoch, position), never of world size, worker count or
restarts. A loader's state is what it handed over, not what its workers fetched ahead.

Words: an epoch's **order** lists its samples; a **row** is one micro-batch on every rank; a
**feed** yields this rank's batches with the position after each. `order` and `options` are plain
Python, `source` reads the user's `DataLoader`, `sampler`, `stream` and `dispatch` share it out,
`loader` counts, `device` copies ahead, `hooks` says what a strategy has to do at which of the
Trainer's hooks.
"""

from .loader import ShardedLoader, skip_first_batches
from .no_batch import NoBatch
from .options import DataOptions, Stage
from .shard import shard_dataloader
from .strategy import DataHooks

__all__ = [
    "DataHooks",
    "DataOptions",
    "NoBatch",
    "ShardedLoader",
    "Stage",
    "shard_dataloader",
    "skip_first_batches",
]
