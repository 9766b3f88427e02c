"""Random numbers of datasets and collate functions: seeded by batch, or by sample.

They follow from a key that comes with each batch, not from the process that makes the batch. So a
run that is resumed draws what the undisturbed one would, with any number of workers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from ..support.random_states import capture_cpu, derive_seed, restore, scoped, seed_cpu


class Cell(list[Any]):
    """The indices of one batch, as the sampler hands them to the dataset.

    The key of their random numbers is (seed of the pass, place in the order), or (seed, epoch) if
    each sample is seeded by itself. It cannot be an attribute of the dataset, because persistent
    workers keep their copy of the dataset for the whole run.
    """

    key: tuple[int, int]

    def __init__(self, indices: list[Any], key: tuple[int, int]) -> None:
        super().__init__(indices)
        self.key = key

    def __reduce__(self) -> Any:
        return Cell, (list(self), self.key)


def sample_seed(seed: int, epoch: int, index: Any) -> int:
    """Compute the seed of one sample; an index that is not an integer counts by its ``repr``."""
    number = index if isinstance(index, int) else zlib.crc32(repr(index).encode())
    return derive_seed(seed, epoch, number)


class SeededDataset(Dataset):
    """The user's map-style dataset and ``collate_fn``, with all CPU generators seeded before."""

    def __init__(
        self, dataset: Any, collate: Callable[[Any], Any], is_collated: bool, per_sample: bool
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.is_collated = is_collated
        self.per_sample = per_sample

    def __getitem__(self, cell: Cell) -> Any:
        return self.__getitems__(cell)

    def __getitems__(self, cell: Cell) -> Any:
        """Make one batch."""
        # A worker's generators may stay seeded; the main process needs its own states back.
        with scoped() if get_worker_info() is None else nullcontext():
            seed_cpu(derive_seed(*cell.key))
            return self.collate(self._read(cell))

    def _read(self, cell: Cell) -> Any:
        if self.per_sample:
            samples = [self._read_seeded(cell.key, index) for index in cell]
            return samples if self.is_collated else samples[0]
        if not self.is_collated:
            return self.dataset[cell[0]]
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(list(cell))
        return [self.dataset[index] for index in cell]

    def _read_seeded(self, key: tuple[int, int], index: Any) -> Any:
        seed_cpu(sample_seed(*key, index))
        if hasattr(self.dataset, "__getitem__"):
            return self.dataset[index]
        return self.dataset.__getitems__([index])[0]


class WorkerInit:
    """Shows the user's own dataset in ``get_worker_info()``, and calls their function."""

    def __init__(self, function: Callable[[int], Any] | None) -> None:
        self.function = function

    def __call__(self, worker: int) -> None:
        """Begin a worker."""
        info = get_worker_info()
        assert info is not None
        # A frozen dataclass.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self.function is not None:
            self.function(worker)


def draw_apart(batches: Iterator[Any]) -> Iterator[Any]:
    """Iterate with generator states of its own; between two batches others draw from theirs."""
    own = capture_cpu()
    while True:
        others = capture_cpu()
        restore(own)
        try:
            batch = next(batches)
        except StopIteration:
            return
        finally:
            own = capture_cpu()
            restore(others)
        yield batch
        del batch


def return_unchanged(batch: Any) -> Any:
    """Stand in for a ``collate_fn`` that was called already."""
    return batch
