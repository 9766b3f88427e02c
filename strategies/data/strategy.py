"""The work of a Lightning strategy for its loaders, hook by hook.

This module reaches the Trainer and its loops by attribute. A strategy owns one `DataHooks` for its
whole life and calls it in these of its own methods::

    def setup_environment(self):          super()...; self.data.disable_sampler_injection(trainer)
    def setup(self, trainer):             ...weights exist...; self.data.seed_ranks(trainer)
    def process_dataloader(self, loader): return self.data.shard(trainer, loader)
    def on_train_start(self):             self.data.on_train_start(trainer)
    def on_train_batch_start(self, ...):  self.data.on_train_batch_start(trainer, gather)
    def save_checkpoint(self, checkpoint, ...): self.data.save(trainer, checkpoint); ...
    def load_checkpoint(self, ...):       ...; self.data.load(checkpoint)
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from ..support import random_states
from .loader import SavedRun, ShardedLoader
from .options import DataOptions, Stage
from .shard import shard_dataloader

_LIGHTNINGS_KEY = "combined_loader"  # the key of `_FitLoop.on_save_checkpoint` for these states
_log = logging.getLogger(__name__)
_STAGES: dict[str, Stage] = {
    "train": "fit",
    "sanity_check": "validate",
    "validate": "validate",
    "test": "test",
    "predict": "predict",
}


def own_entries(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what zero3 has added to a checkpoint.

    It lies under "loops", where Lightning reads its own keys alone. The keys of the checkpoint
    itself are those that it has of one device.
    """
    return checkpoint.get("loops", {}).get("zero3", {})


def add_entries(checkpoint: dict[str, Any], **entries: Any) -> None:
    """Add to :func:`own_entries`."""
    checkpoint.setdefault("loops", {}).setdefault("zero3", {}).update(entries)


class DataHooks:
    """Shards a Trainer's loaders and makes its resumes exact.

    Attributes:
        options: the user's choices.
        is_active: False if the user shards (``use_distributed_sampler=False``), so that loaders
            stay as they are; None before `disable_sampler_injection`.
    """

    options: DataOptions
    is_active: bool | None

    def __init__(self, options: DataOptions | None = None) -> None:
        self.options = options or DataOptions()
        self.is_active = None
        self._saved_rng: dict[str, Any] | None = None
        # Loaded states of ranks that this run lacks, kept for a later run that has these ranks.
        self._extra_rank_states: list[random_states.State] = []
        self._compared_epoch: int | None = None

    # ---- before training -------------------------------------------------------------------

    def disable_sampler_injection(self, trainer: Any) -> None:
        """Switch off Lightning's own sampler injection, which shuffles unasked."""
        # `_DataConnector._requires_distributed_sampler` reads this attribute, and
        # `_AcceleratorConnector.is_distributed`; but `LightningModule.log(sync_dist=True)` needs
        # the latter to be true.
        connector = trainer._accelerator_connector
        # Only once: a second run of the same Trainer would read the False that is set below.
        if self.is_active is None:
            self.is_active = bool(connector.use_distributed_sampler)
        if self.is_active:
            connector.use_distributed_sampler = False
            # `_FitLoop.setup_data` calls this before it fetches ahead, but does nothing while
            # `_FitLoop.restarting` is false, as it is after a checkpoint from the end of a run.
            loop = trainer.fit_loop
            loop._load_combined_loader_states = partial(_load_states, loop)

    def seed_ranks(self, trainer: Any) -> None:
        """Give ranks distinct dropout streams; call this after the weights were initialised."""
        if self.options.distinct_rank_rng and _stage(trainer) == "fit":
            rank, _ = self._ranks(trainer)
            random_states.seed_rank(torch.initial_seed(), rank)

    def shard(self, trainer: Any, loader: Any) -> Any:
        """Make this rank's share of a loader, for ``Strategy.process_dataloader``."""
        if self.is_active is not True:
            return loader
        rank, world_size = self._ranks(trainer)
        strategy = trainer.strategy
        stage = _stage(trainer)
        sharded = shard_dataloader(
            loader,
            rank=rank,
            world_size=world_size,
            stage=stage,
            options=self.options,
            device=strategy.root_device,
        )
        if isinstance(sharded, ShardedLoader):
            sharded.find_number = lambda: _find_number(trainer, sharded)
            sharded.accumulate = trainer.accumulate_grad_batches
            if _user_moves_batches(trainer):
                sharded.place_on_device = False
            sharded.read_epoch = lambda: trainer.fit_loop.epoch_progress.current.processed
            if stage == "fit":
                sharded.count_prefetched_batches = lambda: _count_prefetched_batches(trainer)
        return sharded

    def _ranks(self, trainer: Any) -> tuple[int, int]:
        kwargs = trainer.distributed_sampler_kwargs or {}
        return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)

    # ---- training --------------------------------------------------------------------------

    def on_train_start(self, trainer: Any) -> None:
        """Load the pending loader and random states.

        The Trainer calls this after the sanity check and the restore, before the first batch.
        """
        self._compared_epoch = None
        fit_loop = trainer.fit_loop
        combined = fit_loop._combined_loader
        loaders = sharded_loaders(combined)
        # The loaders were set up before the checkpoint was read, if `configure_optimizers` asks for
        # `Trainer.estimated_stepping_batches`.
        if loaders:
            _load_states(fit_loop)
        if any(loader.saved_run for loader in loaders):
            self._resume_loaders(fit_loop, loaders)
        elif loaders and fit_loop.restarting:
            self._warn_of_lost_position(trainer)
        self._continue_cycles(combined, loaders)
        self._continue_on_this_world(trainer, loaders)
        for loader in loaders:
            loader.accumulate = trainer.accumulate_grad_batches
        self._restore_rng(trainer)

    def _resume_loaders(self, fit_loop: Any, loaders: list[ShardedLoader]) -> None:
        """Begin the pass that goes on, now that Lightning knows whether an epoch does or begins."""
        epoch = fit_loop.epoch_progress.current.processed
        # Without lengths, `_FitLoop.setup_data` let `_PrefetchDataFetcher` fetch a batch already: a
        # queue would give others if the same pass began again.
        if not all(loader.reads_epoch(epoch) for loader in loaders):
            for loader in loaders:
                loader.reload_state()
                loader.set_epoch(epoch)
            iter(fit_loop._data_fetcher)
        epoch_loop = fit_loop.epoch_loop
        progress = epoch_loop.batch_progress
        has_ended = epoch_loop.restarted_on_train_batch_end and progress.is_last_batch
        if has_ended and fit_loop.max_batches == float("inf"):
            # `_TrainingEpochLoop.reset` recognises the end of an epoch only by the epoch's length,
            # and would go on counting.
            _set_done_batches(progress, 0)
            progress.is_last_batch = False

    def _warn_of_lost_position(self, trainer: Any) -> None:
        # `_TrainingEpochLoop.reset` does not warn if all loaders have `load_state_dict`, even when
        # the checkpoint has no states for them.
        progress = trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.processed
        if (
            self._ranks(trainer)[0] == 0
            and 0 < done < trainer.fit_loop.max_batches
            and not progress.is_last_batch
        ):
            warnings.warn(
                f"The checkpoint was made after batch {done} of an epoch, by another strategy, and"
                " does not say where its loaders were: the rest of this epoch takes samples from"
                " the beginning of the order again.\nResume from one that was made at the end of an"
                " epoch, or by zero3.",
                stacklevel=2,
            )

    def on_train_batch_start(self, trainer: Any, gather: Callable[[Any], list[Any]]) -> None:
        """Compare the ranks' streams, once an epoch."""
        if self._compared_epoch != trainer.current_epoch:
            self._compared_epoch = trainer.current_epoch
            compare_streams(trainer.fit_loop._combined_loader, gather)

    def _continue_cycles(self, combined: Any, loaders: list[ShardedLoader]) -> None:
        """Tell the combined loader which of its loaders had ended once before the checkpoint."""
        # `_MaxSizeCycle.__iter__` sets all `_consumed` to False.
        iterator = getattr(combined, "_iterator", None)
        consumed = getattr(iterator, "_consumed", None)
        if consumed is None or not any(loader.saved_run for loader in loaders):
            return
        for index, loader in enumerate(combined.flattened):
            if isinstance(loader, ShardedLoader) and loader.saved_run is not None:
                consumed[index] = consumed[index] or loader.place.cycle > 0

    def _continue_on_this_world(self, trainer: Any, loaders: list[ShardedLoader]) -> None:
        pairs = [(loader, loader.saved_run) for loader in loaders if loader.saved_run is not None]
        is_changed = False
        for loader, saved in pairs:
            if saved.row_samples != loader.row_samples:
                self._keep_or_report_global_batch(trainer, loader, saved)
                is_changed = True
        if is_changed:
            done_batches = max(saved.batches for _, saved in pairs)
            _set_done_batches(trainer.fit_loop.epoch_loop.batch_progress, done_batches)

    def _keep_or_report_global_batch(
        self, trainer: Any, loader: ShardedLoader, saved: SavedRun
    ) -> None:
        """Keep the global batch by accumulation, or warn or raise with the numbers."""
        saved_batch = saved.row_samples * saved.accumulate
        current_batch = loader.row_samples * trainer.accumulate_grad_batches
        if saved_batch == current_batch:
            return
        summary = (
            f"{loader.label}: the checkpoint was made on {saved.world_size} ranks with"
            f" {saved_batch} samples per optimizer step ({saved.row_samples} x {saved.accumulate}"
            f" accumulated), this run has {loader.world_size} ranks and {current_batch}"
            f" ({loader.row_samples} x {trainer.accumulate_grad_batches})."
        )
        if self.options.on_world_change == "allow":
            if loader.rank == 0:
                warnings.warn(
                    f"{summary} The rest of the epoch is complete and in order, but the steps"
                    ' differ.\nDataOptions(on_world_change="keep_global_batch") adjusts the'
                    " accumulation.",
                    stacklevel=2,
                )
            return
        accumulate, rest = divmod(saved_batch, loader.row_samples)
        if rest or accumulate == 0:
            raise ValueError(
                f"{summary} on_world_change='keep_global_batch' needs a whole number of"
                f" micro-batches of {loader.row_samples}: {saved_batch} / {loader.row_samples} is"
                " none.\nChoose batch size and ranks such that their product divides"
                f" {saved_batch}."
            )
        trainer.accumulate_grad_batches = accumulate
        _log.info(
            "%s accumulate_grad_batches is now %d, which keeps %d samples per step.",
            summary,
            accumulate,
            saved_batch,
        )

    # ---- checkpoints -----------------------------------------------------------------------

    def save(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Add every rank's random states to the checkpoint's loops. A collective: all ranks save.

        The loaders' states move there, too. Other strategies, whose loaders have no
        states, could not resume from a file that has states under Lightning's key.
        """
        states = random_states.gather_states()
        ranks = [*states, *self._extra_rank_states]
        add_entries(checkpoint, rng={"ranks": len(states), "states": ranks})
        combined, loop = trainer.fit_loop._combined_loader, _fit_loop_of(checkpoint)
        if _LIGHTNINGS_KEY in loop and len(sharded_loaders(combined)) == len(combined.flattened):
            add_entries(checkpoint, loaders=loop.pop(_LIGHTNINGS_KEY))

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random states until training starts, and give Lightning the loaders' states."""
        own = own_entries(checkpoint)
        self._saved_rng = own.get("rng")
        if "loaders" in own:
            _fit_loop_of(checkpoint)[_LIGHTNINGS_KEY] = own["loaders"]

    def _restore_rng(self, trainer: Any) -> None:
        saved, self._saved_rng = self._saved_rng, None
        rank, world_size = self._ranks(trainer)
        self._extra_rank_states = [] if saved is None else saved["states"][world_size:]
        if saved is None:
            return
        seed = torch.initial_seed() & 0x7FFFFFFF
        random_states.restore_rank(saved["states"], rank, seed, trainer.global_step)
        if world_size != saved["ranks"] and rank == 0:
            warnings.warn(
                f"The number of ranks is {world_size}, in the checkpoint {saved['ranks']}: dropout"
                " and augmentation in the main process go on with other numbers, the same in each"
                " such run. The order of samples is unchanged.",
                stacklevel=2,
            )


# ---- the Trainer's loops, by attribute --------------------------------------------------------


def sharded_loaders(combined: Any) -> list[ShardedLoader]:
    """List the loaders of a combined loader that are `ShardedLoader` objects."""
    flattened = [] if combined is None else combined.flattened
    return [loader for loader in flattened if isinstance(loader, ShardedLoader)]


def compare_streams(combined: Any, gather: Callable[[Any], list[Any]]) -> None:
    """Compare the first samples that the ranks have read of streams that they read alike.

    A collective, once for each loader; samples that cannot be pickled are not compared.

    Args:
        combined: the combined loader of the Trainer's loop.
        gather: returns an object of every rank, in rank order.

    Raises:
        ValueError: on all ranks, if the samples differ.
    """
    loaders = [loader for loader in sharded_loaders(combined) if loader.compares_streams]
    everyone = gather([loader.feed.first_sample for loader in loaders]) if loaders else []
    for loader, samples in zip(loaders, zip(*everyone, strict=True), strict=True):
        if None in samples:
            continue
        loader.compares_streams = False
        if len(set(samples)) > 1:
            raise ValueError(
                f"{loader.label}: the ranks read different streams, and each would keep only its"
                " part of what it reads: samples would be lost.\nIf the dataset shares itself out"
                ' by rank, choose `Zero3Strategy(data=DataOptions(streams="own"))`. If it is'
                " shuffled, seed it alike on all ranks. If only random augmentation of its samples"
                ' differs, choose streams="cut".'
            )


def _load_states(fit_loop: Any) -> None:
    """Load the states that a checkpoint has for the training loaders."""
    if fit_loop._combined_loader_states_to_load and fit_loop._combined_loader is not None:
        fit_loop._combined_loader._load_state_dicts(fit_loop._combined_loader_states_to_load)
        fit_loop._combined_loader_states_to_load = []


def _fit_loop_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})


def _stage(trainer: Any) -> Stage:
    stage = trainer.state.stage
    name = "train" if stage is None else stage.value
    if name == "train":
        fit_loop = trainer.fit_loop
        # In a restart, `_TrainingEpochLoop.advance` can set up validation through
        # `_EvaluationLoop.increment_progress_to_evaluation_end` while the stage says "train".
        if fit_loop._combined_loader is not None and not fit_loop._should_reload_train_dl:
            return "validate"
    return _STAGES[name]


def _count_prefetched_batches(trainer: Any) -> int:
    """Count the batches that were handed out and that the loop has not run.

    `_PrefetchDataFetcher` fetches ahead to know which is the last; an exception ends another.
    """
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    ahead = len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
    return ahead + current.ready - current.processed


def _find_number(trainer: Any, loader: ShardedLoader) -> int:
    """Find the place of a loader among those that its loop reads."""
    fit, validate = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop
    for loop in (fit, validate, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        if loader in (loaders := sharded_loaders(loop._combined_loader)):
            return loaders.index(loader)
    return 0


def _set_done_batches(progress: Any, batches: int) -> None:
    """Set how many batches of the epoch the loop has done, counted in this run's batches."""
    current = progress.current
    # 1 if the checkpoint was made inside a batch's hooks.
    unfinished = current.ready - current.completed
    current.ready = current.started = current.processed = batches
    current.completed = batches - unfinished


def _user_moves_batches(trainer: Any) -> bool:
    """Whether a hook of the user's expects batches on the CPU, as the loader made them."""
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device")
    owners = (trainer.lightning_module, trainer.datamodule)
    return any(is_overridden(name, owner) for owner in owners for name in hooks)
