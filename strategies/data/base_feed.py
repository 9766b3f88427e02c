"""The interface of a feed, which yields batches with positions, and copies of a `DataLoader`.

A feed knows nothing about devices and keeps no count of epochs. It starts at a position, and yields
with every batch the position after the batch. `loader` decides which position counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

from .seeding import WorkerInit

Pairs = Iterator[tuple[Any, Any]]  # (batch, position after the batch)


class Feed(Protocol):
    """A source of this rank's batches, as `ShardedLoader` uses it."""

    loader: DataLoader  # the copy of the user's loader that reads
    label: str  # names rank and loader in errors
    row_samples: int  # samples that all ranks together get in one row

    def start(
        self, epoch: int, cycle: int, position: Any, is_new_epoch: bool, salt: int = 0
    ) -> Pairs:
        """Yield the batches from ``position`` on, each with the position after the batch.

        With ``is_new_epoch``, ``position`` is the end of the epoch before. ``salt`` tells the
        random numbers of loaders apart that are read side by side.
        """
        ...

    def batches_per_rank(self) -> list[int] | None:
        """Count the batches of every rank in a whole epoch; None if the feed cannot know."""
        ...

    def count_done_batches(self, position: Any) -> int | None:
        """Count this rank's batches that are done at ``position``.

        None if only the loader that saved the position knows the number.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Describe the data by facts that a state's feed and this feed must have in common."""
        ...

    def save_position(self, position: Any) -> Any:
        """Convert a position to plain containers."""
        ...

    def load_position(self, state: Any, saved: dict[str, Any]) -> Any:
        """Convert back from `save_position`; raises `ValueError` if ``saved`` is of other data."""
        ...

    def length(self) -> int | None:
        """Count this rank's batches in a whole epoch; None if the feed cannot know."""
        ...

    def is_finished(self, position: Any) -> bool:
        """Whether the pass has no batch after ``position``."""
        ...

    def position_after_rows(self, rows: int) -> Any:
        """Compute the position after some rows of an epoch; None if only reading can find it."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Make lengths refer to this epoch from now on."""
        ...

    def reseed(self, seed: int) -> None:
        """Draw orders from another seed, that of rank 0 or of the run that is resumed."""
        ...

    def rewind(self) -> None:
        """Give up the pass that began last, so that it can begin again."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


def copy_loader(loader: DataLoader, **replaced: Any) -> DataLoader:
    """Copy the user's loader with other attributes; the copy keeps the class of the original.

    A `StatefulDataLoader` becomes a plain loader, because its own state would count the batches
    that were fetched.
    """
    if type(loader).__module__.partition(".")[0] == "torchdata":
        attributes = {
            name: value
            for name, value in vars(loader).items()
            if not name.startswith("_StatefulDataLoader")
        }
        clone = DataLoader.__new__(DataLoader)
        clone.__dict__.update(attributes)
        clone.__dict__.setdefault("_DataLoader__initialized", True)
    else:
        clone = copy.copy(loader)
    # `DataLoader.__setattr__` refuses to change `dataset` and the samplers after construction.
    init = WorkerInit(loader.worker_init_fn)
    clone.__dict__.update(_iterator=None, worker_init_fn=init, **replaced)
    return clone


def close_loader(loader: DataLoader) -> None:
    """End persistent workers; the next iteration starts new ones."""
    iterator = loader.__dict__.get("_iterator")
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
    loader.__dict__["_iterator"] = None
