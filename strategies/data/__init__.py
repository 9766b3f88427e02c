"""Loaders that give every rank its share, and continue with the next sample after a restart.

The order of samples is a function of (seed, epoch, position), never of world size, worker count or
restarts; so are the random numbers that a batch is made with. A loader's state counts the batches
that the loader handed over, not the batches that its workers fetched ahead.

Words: an epoch's **order** lists its samples; a **row** is one micro-batch on every rank; a
**feed** yields this rank's batches, each with the position after the batch.

- `order` cuts an order into rows; `options` holds the user's choices. These are plain Python.
- `source` reads the order of the user's `DataLoader`, which `sampler` cuts for `map_feed`; `stream`
  cuts an `IterableDataset` for `stream_feed`; `dispatch` shares out what rank 0 reads.
- `loader` counts batches; `device` copies them ahead; `strategy` says what a Lightning strategy has
  to do at which of the Trainer's hooks.
"""

from .loader import ShardedLoader
from .no_batch import NoBatch
from .options import DataOptions, Stage
from .shard import shard_dataloader
from .strategy import DataHooks, add_entries, compare_streams, own_entries

__all__ = [
    "add_entries",
    "compare_streams",
    "own_entries",
    "DataHooks",
    "DataOptions",
    "NoBatch",
    "ShardedLoader",
    "Stage",
    "shard_dataloader",
]
