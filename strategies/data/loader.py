"""The loader that a loop reads: it counts the batches it hands over and resumes after them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ..support import profile_range
from ..support.random_states import derive_seed
from .base_feed import Feed, Place
from .device import place_on
from .dispatch import dispatch
from .no_batch import NoBatch
from .options import DataOptions, Stage
from .seeding import WorkerInit

VERSION = 4


@dataclass(frozen=True)
class SavedRun:
    """Facts about the run that saved a state, from the state."""

    world_size: int
    row_samples: int  # samples that all ranks together got per micro-batch
    accumulate: int  # micro-batches per step
    batches: int  # this rank's batches of the epoch that are done, counted as this run cuts them


class ShardedLoader(DataLoader):
    """This rank's share of a user's `DataLoader`, which answers for it.

    It is a `DataLoader` to whoever asks, but reads through its feed. Attributes are those of the
    user's loader; what cannot act on the feed any more is refused.

    The loader reads nothing before the first ``next``, because the epoch and a loaded state are
    known only then.

    Attributes:
        epoch: the epoch that the next pass belongs to, see `set_epoch`.
        read_epoch: returns the epoch that the next pass belongs to; None: `set_epoch` sets it.
        count_prefetched_batches: returns how many of the newest batches the loop has fetched but
            not used; these do not count as handed over.
        find_number: returns which of the loaders that are read together this is.
        place_on_device: whether this loader copies batches to the device.
        compares_streams: whether the ranks have yet to compare what they read of this stream, see
            `compare_streams`.
        accumulate: micro-batches per step, as written into states.
        saved_run: the run that saved the loaded state; None again from the next epoch on.
    """

    epoch: int
    read_epoch: Callable[[], int] | None
    count_prefetched_batches: Callable[[], int]
    find_number: Callable[[], int]
    place_on_device: bool
    compares_streams: bool
    accumulate: int
    saved_run: SavedRun | None

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
        # not `DataLoader.__init__`: its attributes are asked of `source`
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
        self.read_epoch = None
        self.count_prefetched_batches = self.find_number = _count_nothing
        self.place_on_device = options.prefetch_to_device and device.type != "cpu"
        is_read_alike = options.streams is None and options.sharding != "dispatch"
        self.compares_streams = feed.kind == "stream" and is_read_alike and world_size > 1
        self.accumulate = 1
        self.saved_run = None
        self._resume_place: Place | None = None
        self._origin: Place | None = None  # where the newest pass began
        # (batches, position, is_finished) after each of the newest three batches: one in use, one
        # prefetched, one more. Plain tuples, because a `Place` for every batch would cost more than
        # the rest of the bookkeeping.
        self._history: deque[tuple[int, Any, bool]] = deque(maxlen=3)
        self._loaded_state: dict[str, Any] | None = None
        is_dispatched = options.sharding == "dispatch" and world_size > 1
        self._dispatch_group = dist.new_group(backend="gloo") if is_dispatched else None

    # ---- iteration -------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own class
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        origin = self._begin_pass()
        if origin.is_finished:
            return
        length = self._length
        position = origin.position
        batches = origin.batches
        if self.is_empty:
            # Before the reading of pairs, because rank 0 of those that dispatch ends its own
            # steps, in which this rank assists, before it tells that there are no more.
            yield NoBatch()
        pairs, wait = self._start_feed(origin), profile_range("wait for batch")
        while True:
            with wait:
                pair = next(pairs, None)
            if pair is None:
                break
            batch, position = pair
            del pair
            batches += 1
            if length is None:
                is_finished = self.feed.is_finished(position)
            else:
                is_finished = batches >= length
            if self._origin is origin:  # a newer pass may have begun meanwhile
                self._history.append((batches, position, is_finished))
            yield batch
            del batch  # the loop may have dropped the batch: free its memory for the next one
        if self._origin is origin:
            # One more entry, even if the last one is finished already: the loop may have prefetched
            # a step of a combined loader to which this loader gave no batch.
            self._history.append((batches, position, True))

    def _begin_pass(self) -> Place:
        """Decide where this pass begins, and forget the batches of the pass before."""
        if self.read_epoch is not None:
            self.set_epoch(self.read_epoch())
        # A new object, even if the same pass begins again: an older iterator tells by it that it is
        # not the newest.
        self._origin = origin = replace(self._choose_origin())
        self._history.clear()
        if origin.is_finished:
            self._history.append((origin.batches, origin.position, True))
        return origin

    def _choose_origin(self) -> Place:
        resume, self._resume_place = self._resume_place, None
        last = self._place_at(-1) if self._history else None
        if self._origin is not None and not (last is not None and last.is_finished):
            self.feed.rewind()
        if resume is not None and resume.epoch == self.epoch:
            # A finished place gives an empty pass, after which a combined loader begins the next.
            return resume
        if resume is not None and resume.is_finished and resume.epoch + 1 == self.epoch:
            return Place(self.epoch, 0, 0, resume.position, True)
        if self._origin is None or self._origin.epoch != self.epoch or last is None:
            return Place(self.epoch)
        if last.is_finished:
            return Place(self.epoch, last.cycle + 1 if self.stage == "fit" else 0)
        # At most one batch was read, by the prefetch of an iterator that was replaced since: the
        # same pass begins again.
        return self._origin if last.batches - self._origin.batches <= 1 else Place(self.epoch)

    def _start_feed(self, origin: Place) -> Iterator[tuple[Any, Any]]:
        # Data that is made of noise must not be the same in validation, or in a loader beside.
        salt = derive_seed(self.stage == "fit", self.find_number())
        pairs = self.feed.start(origin, salt)
        if self._dispatch_group is not None:
            pairs = dispatch(pairs, self._dispatch_group, self.label)
        if not self.place_on_device:
            return pairs
        # Without workers, the dataset may look at what the current step changes.
        return place_on(self.device, pairs, ahead=self.feed.loader.num_workers > 0)

    # ---- lengths ---------------------------------------------------------------------------

    def __len__(self) -> int:
        """Count this rank's batches in a whole epoch; 1 if there is only a `NoBatch`."""
        length = self._length
        if length is None:
            raise TypeError(f"{self.label}: the loader has no length, because its dataset has none")
        return length + self.is_empty

    @property
    def _length(self) -> int | None:
        counts = self.batches_per_rank
        return None if counts is None else counts[self.rank]

    @property
    def batches_per_rank(self) -> list[int] | None:
        """The number of batches of every rank in a whole epoch; None for data without a length."""
        return self.feed.batches_per_rank()

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no sample while others evaluate some: it gets one `NoBatch`."""
        counts = self.batches_per_rank
        return self.stage != "fit" and counts is not None and counts[self.rank] == 0 < max(counts)

    @property
    def may_lack_batches(self) -> bool:
        """Whether a rank gets a `NoBatch` in the last rows: evaluation of an unknown length."""
        return self.stage != "fit" and self.batches_per_rank is None

    @property
    def row_samples(self) -> int:
        """The number of samples that all ranks together get in one full micro-batch."""
        return self.feed.row_samples

    # ---- state -----------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass; the same epoch again changes nothing."""
        if epoch == self.epoch:
            return
        self.epoch = epoch
        self.feed.set_epoch(epoch)
        if self._resume_place is None:
            self.saved_run = None

    @property
    def place(self) -> Place:
        """The place after the last batch that the loop uses or has used."""
        if self._origin is None:
            return self._resume_place or Place(self.epoch)
        if self._resume_place is not None:
            return self._resume_place
        index = len(self._history) - 1 - self.count_prefetched_batches()
        return self._place_at(index) if index >= 0 else self._origin

    def _place_at(self, index: int) -> Place:
        assert self._origin is not None
        batches, position, is_finished = self._history[index]
        return Place(self._origin.epoch, self._origin.cycle, batches, position, False, is_finished)

    def state_dict(self) -> dict[str, Any]:
        """Save the place after the last batch handed over.

        A collective only where each rank has data of its own: with ``streams="own"``, or with a
        `DistributedSampler` of the user's.
        """
        place = self.place
        state: dict[str, Any] = {
            "version": VERSION,
            "place": dict(vars(place)),
            "seed": self.seed,
            "world_size": self.world_size,
            "row_samples": self.row_samples,
            "accumulate": self.accumulate,
            "feed": self.feed.describe(),
        }
        if self.feed.is_sharded_by_user and self.world_size > 1:
            positions: list[Any] = [None] * self.world_size
            dist.all_gather_object(positions, place.position)
            state["position_per_rank"] = positions
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next pass continue after the last batch that the saved loader handed over."""
        self._check_state(state)
        self.seed = state["seed"]
        self.feed.reseed(state["seed"])
        saved_place = Place(**state["place"])
        position = saved_place.position
        if "position_per_rank" in state:
            position = state["position_per_rank"][self.rank]
        self.feed.set_epoch(saved_place.epoch)
        self.feed.require_same(state["feed"])
        self._origin = None
        self._history.clear()
        done_batches = self.feed.count_done_batches(position)
        if done_batches is None:
            done_batches = saved_place.batches * state["row_samples"] // self.row_samples
        place = replace(saved_place, batches=done_batches, position=position)
        self._resume_place = place
        # A loop that calls no `set_epoch` continues with the next epoch after a finished one.
        self.epoch = place.epoch + place.is_finished
        self.feed.set_epoch(self.epoch)
        done_batches = 0 if self.epoch > place.epoch else place.batches
        self.saved_run = SavedRun(
            state["world_size"], state["row_samples"], state["accumulate"], done_batches
        )
        self._loaded_state = state

    def reads_epoch(self, epoch: int) -> bool:
        """Whether a pass of ``epoch`` has begun since a state was loaded."""
        return self._origin is not None and self.epoch == epoch

    def reload_state(self) -> None:
        """Load again the state that was loaded last."""
        if self._loaded_state is not None:
            if self._origin is not None:
                self.feed.rewind()
            self.load_state_dict(self._loaded_state)

    def _check_state(self, state: dict[str, Any]) -> None:
        if state.get("version") != VERSION:
            raise ValueError(
                f"{self.label}: the checkpoint holds a loader state of version"
                f" {state.get('version')!r}, this code reads version {VERSION}.\nAnother"
                " loader or another release saved the state."
            )
        if state["feed"]["kind"] != self.feed.kind:
            raise ValueError(
                f"{self.label}: the checkpoint's loader was a {state['feed']['kind']}, this is a"
                f" {self.feed.kind}"
            )
        if state["world_size"] != self.world_size and self.feed.is_sharded_by_user:
            raise ValueError(
                f"{self.label}: the user shards the data by rank, so the positions of"
                f" {state['world_size']} ranks mean nothing on {self.world_size}.\nResume on"
                f" {state['world_size']} ranks, or let the strategy shard the data."
            )

    # ---- attributes of a `DataLoader` that Lightning and users read --------------------------

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["source"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_settable = name in ("worker_init_fn", "_iterator")
        if not is_settable and name in vars(self.__dict__.get("source", self)):
            raise AttributeError(
                f"{self.label}: {name.removeprefix('_DataLoader__')!r} cannot change any more: the"
                " ranks share the loader as it was.\nSet it on your own `DataLoader` before the"
                " run, or return another one (`reload_dataloaders_every_n_epochs`); what you set on"
                " its dataset and samplers acts from the next epoch on."
            )
        object.__setattr__(self, name, value)

    @property
    def batch_sampler(self) -> Any:  # type: ignore[override]  # read only
        """The user's batch sampler.

        While predicting it is Lightning's `_IndexBatchSamplerWrapper`, which records indices.
        """
        loader = self.feed.loader if self.stage == "predict" else self.source
        return loader.batch_sampler

    @property
    def worker_init_fn(self) -> Any:
        """The function that the feed's loader calls in each new worker."""
        # Lightning's `_auto_add_worker_init_fn` sets this attribute.
        init: Any = self.feed.loader.worker_init_fn  # a `WorkerInit`
        return init.function

    @worker_init_fn.setter
    def worker_init_fn(self, fn: Any) -> None:
        self.feed.loader.worker_init_fn = WorkerInit(fn)

    @property
    def _iterator(self) -> None:
        """None; setting the attribute ends the workers."""
        # Lightning's `_shutdown_workers_and_reset_iterator` sets the attribute to None.
        return None

    @_iterator.setter
    def _iterator(self, value: None) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, and keep the state."""
        self.feed.close()


def _count_nothing() -> int:
    return 0
