"""The loader that a loop sees: it counts what it hands over, and continues from there."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from .base_feed import Feed
from .device import DeviceFeed
from .no_batch import NoBatch
from .options import DataOptions, Stage
from .stream import is_stateful

VERSION = 1


@dataclass(frozen=True)
class Place:
    """Where a loader stands between two batches.

    Attributes:
        epoch: of the sequence of samples.
        cycle: pass within the epoch; above 0 when a combined loader starts a short loader again.
        batches: this rank's batches of the pass that were handed over.
        position: the feed's own measure; None is the beginning.
        new_epoch: ``position`` is the end of the epoch before.
        finished: nothing is left in this pass.
    """

    epoch: int
    cycle: int = 0
    batches: int = 0
    position: Any = None
    new_epoch: bool = False
    finished: bool = False


@dataclass(frozen=True)
class Resumed:
    """What a loaded state said about the run that saved it."""

    world_size: int
    row_samples: int  # samples that all ranks together got per micro-batch
    accumulate: int  # micro-batches per step
    batches: int  # of this rank that count as done, in this run's micro-batches


class ShardedLoader:
    """This rank's share of a user's `DataLoader`.

    Nothing is read before the first ``next``: only then are the epoch and a loaded state known.

    Attributes:
        epoch: the epoch that the next pass belongs to, see `set_epoch`.
        held_by_consumer: how many of the batches handed over last the loop keeps for later; these
            do not count as handed over.
        place_on_device: whether batches are copied to the device here.
        accumulate: micro-batches per step, written into states.
        resumed: what the last loaded state said, until the next epoch begins.
    """

    epoch: int
    held_by_consumer: Callable[[], int]
    place_on_device: bool
    accumulate: int
    resumed: Resumed | None

    def __init__(
        self,
        feed: Feed,
        source: DataLoader,
        options: DataOptions,
        stage: Stage,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.feed = feed
        self.source = source
        self.options = options
        self.stage = stage
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.device = device
        self.label = feed.label
        self.epoch = 0
        self.held_by_consumer = _nothing_held
        self.place_on_device = options.prefetch_to_device and device.type != "cpu"
        self.accumulate = 1
        self.resumed = None
        self._resume: Place | None = None
        self._begun: Place | None = None  # where the newest pass began
        # (batches, position, finished) after the newest batches: one in the loop, one held, one
        # more. Plain tuples: a `Place` for every batch would cost more than the rest of the
        # bookkeeping.
        self._history: deque[tuple[int, Any, bool]] = deque(maxlen=3)
        self._loaded: dict[str, Any] | None = None
        self._skip_next = 0

    # ---- iteration -------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        begin = self._begin()
        if begin.finished:
            return
        length = self.feed.length()
        position = begin.position
        batches = begin.batches
        for batch, position in self._pairs(begin):
            batches += 1
            finished = batches >= length if length is not None else self.feed.finished(position)
            if self._begun is begin:  # a newer pass may have begun meanwhile
                self._history.append((batches, position, finished))
            yield batch
            del batch  # the loop may be done with it: its memory is for the next one
        if self._begun is begin:
            # Once more even if the last batch said so: what the consumer holds now is a step of a
            # combined loader to which this loader gave nothing.
            self._history.append((batches, position, True))
        if self.is_empty:
            yield NoBatch()

    def _begin(self) -> Place:
        """Decide where this pass begins."""
        begin = self._place_to_begin()
        if self._skip_next:
            begin = self._skipped(begin)
        self._begun = begin
        self._history.clear()
        if begin.finished:
            self._history.append((begin.batches, begin.position, True))
        return begin

    def _place_to_begin(self) -> Place:
        resume, self._resume = self._resume, None
        last = self._place_at(-1) if self._history else None
        if self._begun is not None and not (last is not None and last.finished):
            self.feed.rewind()
        if resume is not None and resume.epoch == self.epoch:
            return resume  # if finished: an empty pass, which tells a combined loader to go on
        if resume is not None and resume.finished and resume.epoch + 1 == self.epoch:
            return Place(self.epoch, 0, 0, resume.position, True)
        if self._begun is None or self._begun.epoch != self.epoch or last is None:
            return Place(self.epoch)
        if last.finished:
            return Place(self.epoch, last.cycle + 1 if self.stage == "fit" else 0)
        # Only the look-ahead of an iterator that was replaced has read anything: the same pass
        # again.
        return self._begun if last.batches - self._begun.batches <= 1 else Place(self.epoch)

    def _pairs(self, begin: Place) -> Iterator[tuple[Any, Any]]:
        pairs = self.feed.start(begin.epoch, begin.cycle, begin.position, begin.new_epoch)
        if self._skip_next:
            pairs = islice(pairs, self._skip_next, None)
            self._skip_next = 0
        if not self.place_on_device:
            return pairs
        # Fetching ahead in this process would draw random numbers for the next batch before the
        # current step draws its own, which a resumed run cannot repeat.
        ahead = self.feed.inner.num_workers > 0 or self.options.per_sample_seed
        return DeviceFeed(pairs, self.device, ahead)

    def skip_first_batches(self, batches: int) -> ShardedLoader:
        """The next pass, and only that, leaves out this rank's first ``batches`` batches."""
        self._skip_next = batches
        return self

    def _skipped(self, begin: Place) -> Place:
        position = self.feed.after_rows(begin.batches + self._skip_next)
        batches = begin.batches + self._skip_next
        if position is None:
            return Place(begin.epoch, begin.cycle, batches, begin.position, begin.new_epoch)
        self._skip_next = 0
        return Place(begin.epoch, begin.cycle, batches, position)

    # ---- lengths ---------------------------------------------------------------------------

    def __len__(self) -> int:
        """This rank's batches in a whole epoch, and 1 for a `NoBatch`."""
        length = self.feed.length()
        if length is None:
            raise TypeError(
                f"{self.label}: it has no length, because its dataset or its sampler has none"
            )
        return length + self.is_empty

    @property
    def batches_per_rank(self) -> list[int] | None:
        """Batches of every rank in a whole epoch; None for streams without a length."""
        return self.feed.batches_per_rank()

    @property
    def is_empty(self) -> bool:
        """Other ranks evaluate samples and there is none for this rank, which is handed a single
        `NoBatch`.
        """
        counts = self.batches_per_rank
        return self.stage != "fit" and counts is not None and counts[self.rank] == 0 < max(counts)

    @property
    def may_lack_batches(self) -> bool:
        """The length is unknown: ranks without a sample in the last rows are handed `NoBatch`
        there.
        """
        return self.stage != "fit" and self.feed.length() is None

    @property
    def row_samples(self) -> int:
        """Samples that all ranks together get in one full micro-batch."""
        return self.feed.row_samples

    # ---- state -----------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass belongs to. The same epoch again changes nothing."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self.feed.set_epoch(epoch)
        if self._resume is None:
            self.resumed = None

    @property
    def place(self) -> Place:
        """Where the loop stands: after the last batch that it does not hold back."""
        if self._begun is None:
            return self._resume or Place(self.epoch)
        if self._resume is not None:
            return self._resume
        index = len(self._history) - 1 - self.held_by_consumer()
        return self._place_at(index) if index >= 0 else self._begun

    def _place_at(self, index: int) -> Place:
        assert self._begun is not None
        batches, position, finished = self._history[index]
        return Place(self._begun.epoch, self._begun.cycle, batches, position, False, finished)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch handed over. A collective only for ``streams="own"``."""
        place = self.place
        state = {
            "version": VERSION,
            "epoch": place.epoch,
            "cycle": place.cycle,
            "batches": place.batches,
            "new_epoch": place.new_epoch,
            "finished": place.finished,
            "position": self.feed.save(place.position),
            "seed": self.seed,
            "world_size": self.world_size,
            "row_samples": self.row_samples,
            "accumulate": self.accumulate,
            "feed": self.feed.describe(),
        }
        if self._differs_by_rank() and self.world_size > 1:
            positions: list[Any] = [None] * self.world_size
            dist.all_gather_object(positions, state["position"])
            state["position_per_rank"] = positions
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue, at the next pass, after the last batch that the saved loader handed over."""
        self._check(state)
        self.seed = state["seed"]
        self.feed.reseed(state["seed"])
        saved = (
            state["position_per_rank"][self.rank]
            if "position_per_rank" in state
            else state["position"]
        )
        self.feed.set_epoch(state["epoch"])
        position = self.feed.load(saved, state["feed"])
        self._begun = None
        self._history.clear()
        done = self.feed.done_before(position)
        if done is None:
            done = state["batches"] * state["row_samples"] // self.row_samples
        place = Place(
            state["epoch"], state["cycle"], done, position, state["new_epoch"], state["finished"]
        )
        self._warn_of_skipping(place)
        self._resume = place
        # Whoever does not say the epoch continues with the next one.
        self.epoch = place.epoch + place.finished
        self.feed.set_epoch(self.epoch)
        done = 0 if self.epoch > place.epoch else place.batches
        self.resumed = Resumed(state["world_size"], state["row_samples"], state["accumulate"], done)
        self._loaded = state

    def reload(self) -> None:
        """Go back to the state that was loaded last."""
        if self._loaded is not None:
            if self._begun is not None:
                self.feed.rewind()
            self.load_state_dict(self._loaded)

    def _check(self, state: dict[str, Any]) -> None:
        if state.get("version") != VERSION:
            raise ValueError(
                f"{self.label}: the checkpoint holds a loader state of version"
                f" {state.get('version')!r}, this code reads version {VERSION}. HINT: it was saved"
                " by another loader or another release."
            )
        kind = self.feed.describe()["kind"]
        if state["feed"]["kind"] != kind:
            raise ValueError(
                f"{self.label}: the checkpoint's loader was a {state['feed']['kind']}, this is a"
                f" {kind}"
            )
        if state["world_size"] != self.world_size and self._differs_by_rank():
            raise ValueError(
                f"{self.label}: the data is sharded by the user (rank by rank), so its positions on"
                f" {state['world_size']} ranks mean nothing on {self.world_size}. HINT: resume on"
                f" {state['world_size']} ranks, or let the strategy shard the data."
            )

    def _differs_by_rank(self) -> bool:
        facts = self.feed.describe()
        return bool(facts.get("own") or facts.get("sharded_by_user"))

    def _warn_of_skipping(self, place: Place) -> None:
        skips = (
            place.position is not None
            and place.batches
            and not place.finished
            and self._loaded is None
        )
        if self.feed.describe()["kind"] == "stream" and skips:
            if self.rank == 0 and not is_stateful(self.dataset):
                warnings.warn(
                    f"{self.label}: {type(self.dataset).__name__} cannot go to a position, so it is"
                    " read from its beginning and what was handed over before the checkpoint is"
                    " thrown away. Implement `state_dict()` and `load_state_dict(state)` on the"
                    " dataset (or on the iterator it returns): state_dict is taken after each"
                    " batch, and iter() after load_state_dict continues there.",
                    stacklevel=3,
                )

    # ---- what Lightning and users look for on a loader ---------------------------------------

    @property
    def dataset(self) -> Any:
        """The user's dataset."""
        return self.source.dataset

    @property
    def sampler(self) -> ShardedLoader:
        """Itself: code that calls ``loader.sampler.set_epoch`` reaches `set_epoch`."""
        return self

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the loader inside, which records indices while predicting."""
        return self.feed.inner.batch_sampler

    @property
    def num_workers(self) -> int:
        """Of the loader inside."""
        return self.feed.inner.num_workers

    @property
    def batch_size(self) -> int | None:
        """The user's."""
        return self.source.batch_size

    @property
    def worker_init_fn(self) -> Any:
        """Of the loader inside."""
        return self.feed.inner.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, fn: Any) -> None:
        self.feed.inner.worker_init_fn = fn

    @property
    def _iterator(self) -> None:
        """Lightning sets this to None where it ends a loader's workers."""
        return None

    @_iterator.setter
    def _iterator(self, value: None) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. The state stays."""
        self.feed.close()


def skip_first_batches(loader: ShardedLoader, batches: int) -> ShardedLoader:
    """Leave out the first batches of the loader's next pass; O(1) for map-style data."""
    return loader.skip_first_batches(batches)


def _nothing_held() -> int:
    return 0
