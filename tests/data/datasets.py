"""Datasets for the tests, importable by name in the loaders' worker processes."""

import multiprocessing
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_zero3.strategies.data import DataOptions, shard_dataloader

# Forked workers can deadlock on Python 3.11. Workers come from a server that has imported torch
# once.
CONTEXT = "forkserver"
multiprocessing.get_context(CONTEXT).set_forkserver_preload(
    ["torch", "torch.distributed", "lightning.pytorch", "lightning_zero3", "pytest"]
)


class Indices(Dataset):
    """Sample ``i`` is ``i``."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index


class Counted(Indices):
    """Counts how many samples were read, in this process."""

    def __init__(self, size):
        super().__init__(size)
        self.reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


class Augmented(Indices):
    """Sample ``i`` with noise from all three generators."""

    def __getitem__(self, index):
        return torch.tensor(
            [index, random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64
        )


class NoisyStream(IterableDataset):
    """The samples of `Augmented`; each worker takes every n-th."""

    def __init__(self, size):
        self.size = size

    def __iter__(self):
        info = get_worker_info()
        for index in range(info.id if info else 0, self.size, info.num_workers if info else 1):
            yield Augmented(self.size)[index]


class Stream(IterableDataset):
    """0, 1, ... each worker takes every n-th. No state."""

    def __init__(self, size, length=False):
        self.size = size
        if length:
            self.__class__ = SizedStream

    def start(self):
        return 0

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        items = range(worker, self.size, workers)
        for place in range(self.start(), len(items)):
            self.passed(place + 1)
            yield items[place]
        self.ended()

    def passed(self, place):
        pass

    def ended(self):
        pass


class SizedStream(Stream):
    def __len__(self):
        return self.size


class StatefulStream(Stream):
    """Keeps a cursor and sets it back at its end."""

    cursor = 0
    loads = 0

    def start(self):
        return self.cursor

    def passed(self, place):
        self.cursor = place

    def ended(self):
        self.cursor = 0

    def state_dict(self):
        return {"cursor": self.cursor}

    def load_state_dict(self, state):
        self.cursor = state["cursor"]
        self.loads += 1


class RankStream(Stream):
    """Picks its samples by rank, as under `ddp`; worker processes know no rank, so it is told."""

    def __init__(self, size, rank, world):
        super().__init__(size // world)
        self.rank, self.world = rank, world

    def __iter__(self):
        return (index * self.world + self.rank for index in super().__iter__())


class ShuffledStream(Stream):
    """Shuffled by python's global generator."""

    def __iter__(self):
        items = list(range(self.size))
        random.shuffle(items)
        return iter(items)


class FunctionStream(RankStream):
    """Samples that cannot be pickled."""

    def __iter__(self):
        return ((lambda index=index: index) for index in super().__iter__())


class FlaggedStream(Stream):
    """Begins anew at every ``iter`` but the one after a load; its state at the end is the end."""

    place = 0
    resume = 0

    def start(self):
        start, self.resume = self.resume, 0
        self.place = start
        return start

    def passed(self, place):
        self.place = place

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.resume = state["place"]


def make_loader(dataset, workers=0, **kwargs):
    context = CONTEXT if workers else None
    return DataLoader(dataset, num_workers=workers, multiprocessing_context=context, **kwargs)


def shards(make, world, stage="fit", **options):
    """The loaders of all ranks, in one process."""
    options = DataOptions(**{"seed": 5, **options})
    return [
        shard_dataloader(make(), rank=r, world_size=world, stage=stage, options=options)
        for r in range(world)
    ]


def as_list(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def row_major(per_rank):
    """Items of all ranks in the global order of rows."""
    rows = max(map(len, per_rank), default=0)
    return [i for row in range(rows) for rank in per_rank if row < len(rank) for i in rank[row]]
