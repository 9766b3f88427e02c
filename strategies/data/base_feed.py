"""Where a loader's batches come from, as (batch, position) pairs; and copies of the user's
`DataLoader` to make them.

A feed knows nothing about epochs' bookkeeping or devices; it starts at a position and says, with
every batch, the position after it. `loader` decides which position counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

Pairs = Iterator[tuple[Any, Any]]


class Feed(Protocol):
    """What `ShardedLoader` needs to know of its data."""

    inner: DataLoader
    label: str
    row_samples: int  # samples that all ranks together get in one row

    def start(self, epoch: int, cycle: int, position: Any, new_epoch: bool) -> Pairs:
        """Batches from ``position`` on, each with the position after it."""
        ...

    def batches_per_rank(self) -> list[int] | None:
        """Batches of every rank in a whole epoch; None if unknown."""
        ...

    def done_before(self, position: Any) -> int | None:
        """This rank's batches that count as done at ``position``; None: as many as were counted."""
        ...

    def describe(self) -> dict[str, Any]:
        """What must be the same when a state is loaded."""
        ...

    def save(self, position: Any) -> Any:
        """A position as plain containers."""
        ...

    def load(self, state: Any, saved: dict[str, Any]) -> Any:
        """The inverse of `save`; raises if ``saved`` describes other data."""
        ...

    def length(self) -> int | None:
        """This rank's batches in a whole epoch; None if unknown."""
        ...

    def finished(self, position: Any) -> bool:
        """Whether nothing is left after ``position``."""
        ...

    def after_rows(self, rows: int) -> Any:
        """The position after some rows of an epoch, None if it has to be read to be known."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Lengths asked for from now on are those of this epoch."""
        ...

    def reseed(self, seed: int) -> None:
        """Draw orders from another seed, that of the run which is resumed."""
        ...

    def rewind(self) -> None:
        """The pass that began last is given up and begins again."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


def copy_loader(loader: DataLoader, **replaced: Any) -> DataLoader:
    """The user's loader with other attributes, class and all; the user's object stays as it is.

    Past ``__setattr__``, which refuses these after construction. A `StatefulDataLoader` becomes a
    plain loader: its own state would count what was fetched.
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
    clone.__dict__.update(_iterator=None, **replaced)
    return clone


def close_loader(loader: DataLoader) -> None:
    """End persistent workers; the next iteration starts new ones."""
    iterator = loader.__dict__.get("_iterator")
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
    loader.__dict__["_iterator"] = None
