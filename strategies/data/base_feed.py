"""What all feeds are, and copies of a `DataLoader`.

A feed yields batches with positions. It knows nothing about devices and keeps no count of epochs.
It starts at a place, and yields with every batch the position after the batch. `loader` decides
which position counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch.utils.data import DataLoader

from .seeding import WorkerInit
from .source import is_torchdata

Pairs = Iterator[tuple[Any, Any]]  # (batch, position after the batch)


@dataclass(frozen=True)
class Place:
    """A place between two batches of a loader.

    Attributes:
        epoch: the epoch whose order the pass reads.
        cycle: pass within the epoch; above 0 when a combined loader starts a short loader again.
        batches: this rank's batches of the pass that the loader has handed over.
        position: the position in the feed's own measure, of plain containers; None means the
            beginning.
        is_new_epoch: ``position`` is the end of the epoch before.
        is_finished: the pass has no batch left.
    """

    epoch: int
    cycle: int = 0
    batches: int = 0
    position: Any = None
    is_new_epoch: bool = False
    is_finished: bool = False


class Feed(ABC):
    """A source of this rank's batches, as `ShardedLoader` uses it.

    Attributes:
        kind: the kind of data.
        loader: the copy of the user's loader that reads.
        label: names rank and loader in errors.
        row_samples: samples that all ranks together get in one row.
        is_sharded_by_user: all that the loader yields is for this rank.
        first_sample: the checksum of the newest pass's first sample over all ranks, if the ranks
            read one stream; None until it was read.
    """

    kind: ClassVar[str]
    loader: DataLoader
    label: str
    row_samples: int
    is_sharded_by_user: bool
    first_sample: int | None = None

    @abstractmethod
    def start(self, place: Place, salt: int = 0) -> Pairs:
        """Yield the batches from ``place`` on, each with the position after the batch.

        Args:
            place: where the pass begins.
            salt: tells the random numbers of loaders apart that are read side by side.
        """

    @abstractmethod
    def batches_per_rank(self) -> list[int] | None:
        """Count the batches of every rank in a whole epoch; None if the feed cannot know.

        Ranks whose data the user shards are supposed to have as many as this one.
        """

    def is_finished(self, position: Any) -> bool:
        """Whether the pass has no batch after ``position``; asked of data without a length."""
        raise NotImplementedError

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe the data by facts that a state's feed and this feed must have in common."""

    @abstractmethod
    def require_same(self, saved: dict[str, Any]) -> None:
        """Raise a `ValueError` if ``saved``, from `describe`, is of other data."""

    @abstractmethod
    def reseed(self, seed: int) -> None:
        """Draw orders from another seed, that of rank 0 or of the run that is resumed."""

    def count_done_batches(self, position: Any) -> int | None:
        """Count this rank's batches that are done at ``position``.

        None if only the loader that saved the position knows the number.
        """
        return None

    def set_epoch(self, epoch: int) -> None:  # noqa: B027  # most feeds have nothing to do
        """Make lengths refer to this epoch from now on."""

    def rewind(self) -> None:  # noqa: B027  # a pass may depend on its place alone
        """Give up the pass that began last, so that it can begin again."""

    def close(self) -> None:
        """End persistent workers; the next iteration starts new ones."""
        iterator = self.loader.__dict__.get("_iterator")
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
        self.loader.__dict__["_iterator"] = None


def copy_loader(loader: DataLoader, **replaced: Any) -> DataLoader:
    """Copy the user's loader with other attributes; the copy keeps the class of the original.

    A `StatefulDataLoader` becomes a plain loader, because its own state would count the batches
    that were fetched.
    """
    kind = DataLoader if is_torchdata(loader) else type(loader)
    clone = kind.__new__(kind)
    # `DataLoader.__setattr__` refuses to change `dataset` and the samplers after construction.
    clone.__dict__.update(
        vars(loader),
        _DataLoader__initialized=True,
        _iterator=None,
        worker_init_fn=WorkerInit(loader.worker_init_fn),
        **replaced,
    )
    return clone
