"""One seed per sample: augmentation depends on (seed, epoch, index) and on nothing else."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from ..support.random_states import derive_seed, scoped, seed_cpu


class SampleKey(NamedTuple):
    """An index as the sampler hands it to the dataset, together with the epoch.

    The epoch cannot be an attribute of the dataset, because persistent workers keep their copy of
    the dataset for the whole run.
    """

    epoch: int
    index: Any


def sample_seed(seed: int, key: SampleKey) -> int:
    """Compute the seed of one sample; an index that is not an integer counts by its ``repr``."""
    index = key.index
    number = index if isinstance(index, int) else zlib.crc32(repr(index).encode())
    return derive_seed(seed, key.epoch, number)


class SeededDataset(Dataset):
    """The user's map-style dataset, with all CPU generators seeded before each sample."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: SampleKey) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[SampleKey]) -> list[Any]:
        """Make the samples of one batch."""
        # A worker's generators may stay seeded; the main process needs its own states back.
        if get_worker_info() is not None:
            return [self._make_sample(key) for key in keys]
        with scoped():
            return [self._make_sample(key) for key in keys]

    def __len__(self) -> int:
        return len(self.dataset)

    def _make_sample(self, key: SampleKey) -> Any:
        seed_cpu(sample_seed(self.seed, key))
        if hasattr(self.dataset, "__getitem__"):
            return self.dataset[key.index]
        return self.dataset.__getitems__([key.index])[0]
