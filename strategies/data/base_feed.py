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

import torch
from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator
from torch.utils.data import DataLoader

from ..support.random_states import derive_seed
from .options import DataOptions, Stage
from .order import RowPlan
from .seeding import WorkerInit, return_unchanged
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
        is_finished: the pass has no batch left.
    """

    epoch: int
    cycle: int = 0
    batches: int = 0
    position: Any = None
    is_finished: bool = False


class Feed(ABC):
    """A source of this rank's batches, as `ShardedLoader` uses it.

    Attributes:
        kind: the kind of data.
        loader: the copy of the user's loader that reads.
        seed: that of orders and of random numbers.
        label: names rank and loader in errors.
        is_sharded_by_user: all that the loader yields is for this rank.
        shape: how rows are cut, of data that the user shards for this rank alone.
        cell: which cell of a row is this rank's.
        ranks: the ranks whose cells are yielded, row by row; with dispatch all.
        row_samples: samples that all ranks together get in one row.
        first_sample: the checksum of the newest pass's first sample over all ranks, if the ranks
            read one stream; None until it was read.
    """

    kind: ClassVar[str]
    loader: DataLoader
    first_sample: int | None = None

    def __init__(
        self,
        options: DataOptions,
        stage: Stage,
        rank: int,
        world: int,
        seed: int,
        label: str,
        is_sharded_by_user: bool,
        batch_size: int,
        drop_last: bool,
    ) -> None:
        self.rank = rank
        self.world = world
        self.seed = seed
        self.label = label
        self.is_sharded_by_user = is_sharded_by_user
        parts, self.cell = (1, 0) if is_sharded_by_user else (world, rank)
        batch = options.batch_per_rank(batch_size, parts, label)
        self.shape = RowPlan(0, batch, parts, options.wraps(stage, parts), drop_last)
        self.ranks = range(parts) if options.sharding == "dispatch" else [self.cell]
        self.row_samples = batch * world

    @abstractmethod
    def start(self, place: Place, salt: int = 0) -> Pairs:
        """Yield the batches from ``place`` on, each with the position after the batch.

        Args:
            place: where the pass begins.
            salt: tells the random numbers of loaders apart that are read side by side.
        """

    def seed_pass(self, place: Place, salt: int) -> int:
        """Seed what the reading loader draws in a pass; return the seed of what datasets draw."""
        owner = self.rank if self.is_sharded_by_user else 0
        seed = derive_seed(self.seed, place.epoch, place.cycle, salt, owner)
        # Of this generator, `DataLoader` draws the seeds that workers begin with.
        self.loader.generator.manual_seed(derive_seed(seed, self.rank))
        return seed

    @abstractmethod
    def batches_per_rank(self, epoch: int) -> list[int] | None:
        """Count the batches of every rank in a whole epoch; None if the feed cannot know.

        Ranks whose data the user shards are supposed to have as many as this one.
        """

    def is_finished(self, position: Any) -> bool:
        """Whether the pass has no batch after ``position``; asked of data without a length."""
        raise NotImplementedError

    @abstractmethod
    def describe(self, epoch: int) -> dict[str, Any]:
        """Describe the data by facts that a state's feed and this feed must have in common."""

    def count_done_batches(self, epoch: int, position: Any) -> int | None:
        """Count this rank's batches that are done at ``position``.

        None if only the loader that saved the position knows the number.
        """
        return None

    def rewind(self) -> None:  # noqa: B027  # a pass may depend on its place alone
        """Give up the pass that began last, so that the next one can begin at its place."""

    def close(self) -> None:
        """End persistent workers; the next iteration starts new ones."""
        _shutdown_workers_and_reset_iterator(self.loader)


def copy_loader(loader: DataLoader, **replaced: Any) -> DataLoader:
    """Copy the user's loader with other attributes; the copy keeps the class of the original.

    A `StatefulDataLoader` becomes a plain loader, because its own state would count the batches
    that were fetched. The dataset of the copy collates.
    """
    kind = DataLoader if is_torchdata(loader) else type(loader)
    clone = kind.__new__(kind)
    # `DataLoader.__setattr__` refuses to change `dataset` and the samplers after construction.
    clone.__dict__.update(
        vars(loader),
        _DataLoader__initialized=True,
        _iterator=None,
        worker_init_fn=WorkerInit(loader.worker_init_fn),
        collate_fn=return_unchanged,
        generator=torch.Generator(),
        **replaced,
    )
    return clone
