"""What a Lightning strategy does for its loaders, hook by hook.

The Trainer and its loops are reached by attribute: nothing here imports Lightning. A strategy owns
one `DataHooks` for its whole life and forwards these of its own methods to it::

    def setup_environment(self):            super()...; self.data.take_over(trainer)
    def setup(self, trainer):               ...weights exist...; self.data.seed_ranks(trainer)
    def process_dataloader(self, loader):   return self.data.shard(trainer, loader)
    def on_train_start(self):               self.data.on_train_start(trainer)
    def on_train_batch_start(self, ...):    self.data.on_train_batch_start(trainer)
    def save_checkpoint(self, checkpoint, ...):  self.data.save(trainer, checkpoint); ...
    def load_checkpoint(self, ...):         ...; self.data.load(checkpoint)
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from ..support import random_states
from .loader import ShardedLoader
from .options import DataOptions, Stage
from .shard import shard_dataloader

CHECKPOINT_KEY = "zero3_rng"
# where states of loaders are in files, in Lightning's loop
LOADERS_KEY, _LIGHTNINGS_KEY = (
    "zero3_loaders",
    "combined_loader",
)
_log = logging.getLogger(__name__)
_STAGES: dict[str, Stage] = {
    "train": "fit",
    "validate": "validate",
    "test": "test",
    "predict": "predict",
}


class DataHooks:
    """Shards a Trainer's loaders and makes its resumes exact.

    Attributes:
        options: the user's choices.
        active: False when the user shards (``use_distributed_sampler=False``): nothing is touched.
    """

    options: DataOptions
    active: bool | None

    def __init__(self, options: DataOptions | None = None) -> None:
        self.options = options or DataOptions()
        self.active = None
        self._rng: dict[str, Any] | None = None
        self._waiting_rng: list[
            random_states.State
        ] = []  # of ranks that this run has not: they wait for one that has
        self._synchronized_epoch: int | None = None

    # ---- before training -------------------------------------------------------------------

    def take_over(self, trainer: Any) -> None:
        """Switch off Lightning's own sampler injection, which shuffles where the user did not ask.

        Not through ``Strategy.is_distributed``: ``log(sync_dist=True)`` reads that too.
        """
        connector = trainer._accelerator_connector
        if self.active is None:  # a second run of the same Trainer would read our own False
            self.active = bool(connector.use_distributed_sampler)
        if self.active:
            connector.use_distributed_sampler = False

    def seed_ranks(self, trainer: Any) -> None:
        """Give ranks distinct dropout streams. Call it once the weights are initialised."""
        if self.options.distinct_rank_rng and _stage(trainer) == "fit":
            rank, _ = self._ranks(trainer)
            random_states.seed_rank(torch.initial_seed(), rank)

    def shard(self, trainer: Any, loader: Any) -> Any:
        """This rank's share of a loader, for ``Strategy.process_dataloader``."""
        if self.active is not True:
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
            sharded.accumulate = trainer.accumulate_grad_batches
            if _user_moves_batches(trainer):
                sharded.place_on_device = False
            if stage == "fit":
                sharded.held_by_consumer = lambda: _held_by_fetcher(trainer)
        return sharded

    def _ranks(self, trainer: Any) -> tuple[int, int]:
        kwargs = trainer.distributed_sampler_kwargs or {}
        return kwargs.get("rank", 0), kwargs.get("num_replicas", 1)

    # ---- training --------------------------------------------------------------------------

    def on_train_start(self, trainer: Any) -> None:
        """After the sanity check and the restore, before the first batch: load what is pending."""
        fit_loop = trainer.fit_loop
        pending = fit_loop._combined_loader_states_to_load
        combined = fit_loop._combined_loader
        loaders = sharded_loaders(combined)
        # Lightning loads these states only in some of its restarts, and never when the loaders were
        # set up early, by reading `trainer.estimated_stepping_batches` in `configure_optimizers`.
        if pending and loaders:
            combined._load_state_dicts(pending)
            fit_loop._combined_loader_states_to_load = []
        if any(loader.resumed for loader in loaders):
            self._resume(fit_loop, loaders)
        elif loaders and fit_loop.restarting:
            self._report_lost_place(trainer)
        self._continue_cycles(combined, loaders)
        self._continue_on_this_world(trainer, loaders)
        for loader in loaders:
            loader.accumulate = trainer.accumulate_grad_batches
        self._restore_rng(trainer)

    def _resume(self, fit_loop: Any, loaders: list[ShardedLoader]) -> None:
        """Only now is it known whether an epoch goes on or a new one begins."""
        for loader in loaders:
            loader.reload()
            loader.set_epoch(fit_loop.epoch_progress.current.processed)
        iter(fit_loop._data_fetcher)  # without lengths it has fetched a batch already
        epoch_loop = fit_loop.epoch_loop
        progress = epoch_loop.batch_progress
        ended = epoch_loop.restarted_on_train_batch_end and progress.is_last_batch
        if ended and fit_loop.max_batches == float("inf"):
            # Lightning recognises the end of an epoch by its length only, and would go on counting.
            _set_batches_done(progress, 0)
            progress.is_last_batch = False

    def _report_lost_place(self, trainer: Any) -> None:
        # Lightning takes loaders that could go on for loaders that do.
        progress = trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.processed
        if (
            self._ranks(trainer)[0] == 0
            and 0 < done < trainer.fit_loop.max_batches
            and not progress.is_last_batch
        ):
            warnings.warn(
                f"the checkpoint was made after batch {done} of an epoch and does not say where its"
                " loaders were (another strategy wrote it): the rest of this epoch takes samples"
                " from their beginning again. HINT: resume from a checkpoint that was made at the"
                " end of an epoch, or by zero3.",
                stacklevel=2,
            )

    def on_train_batch_start(self, trainer: Any) -> None:
        """Synchronise the generators that the user asked for, once an epoch."""
        types = [name for name in self.options.rng_types if name != "generator"]
        if types and self._synchronized_epoch != trainer.current_epoch:
            self._synchronized_epoch = trainer.current_epoch
            random_states.synchronize(types)

    def _continue_cycles(self, combined: Any, loaders: list[ShardedLoader]) -> None:
        """A combined loader forgets which of its loaders had begun again."""
        iterator = getattr(combined, "_iterator", None)
        consumed = getattr(iterator, "_consumed", None)
        if consumed is None or not any(loader.resumed for loader in loaders):
            return
        for index, loader in enumerate(combined.flattened):
            if isinstance(loader, ShardedLoader) and loader.resumed is not None:
                consumed[index] = consumed[index] or loader.place.cycle > 0

    def _continue_on_this_world(self, trainer: Any, loaders: list[ShardedLoader]) -> None:
        resumed = [(loader, loader.resumed) for loader in loaders if loader.resumed is not None]
        changed = [
            (loader, was) for loader, was in resumed if was.row_samples != loader.row_samples
        ]
        for loader, was in changed:
            self._keep_or_report_global_batch(trainer, loader, was)
        if changed:
            longest = max(resumed, key=lambda pair: pair[1].batches)
            _set_batches_done(trainer.fit_loop.epoch_loop.batch_progress, longest[1].batches)

    def _keep_or_report_global_batch(self, trainer: Any, loader: ShardedLoader, was: Any) -> None:
        before = was.row_samples * was.accumulate
        now = loader.row_samples * trainer.accumulate_grad_batches
        if before == now:
            return
        told = (
            f"{loader.label}: the checkpoint was made on {was.world_size} ranks with {before}"
            f" samples per optimizer step ({was.row_samples} x {was.accumulate} accumulated), this"
            f" run has {loader.world_size} ranks and {now} ({loader.row_samples} x"
            f" {trainer.accumulate_grad_batches})."
        )
        if self.options.on_world_change == "allow":
            if loader.rank == 0:
                warnings.warn(
                    f"{told} The rest of the epoch is complete and in order, but the steps differ."
                    ' HINT: DataOptions(on_world_change="keep_global_batch") adjusts the'
                    " accumulation.",
                    stacklevel=2,
                )
            return
        accumulate, rest = divmod(before, loader.row_samples)
        if rest or accumulate == 0:
            raise ValueError(
                f"{told} on_world_change='keep_global_batch' needs a whole number of micro-batches"
                f" of {loader.row_samples}: {before} / {loader.row_samples} is none. HINT: choose"
                f" batch size and ranks such that their product divides {before}."
            )
        trainer.accumulate_grad_batches = accumulate
        _log.info(
            "%s accumulate_grad_batches is now %d, which keeps %d samples per step.",
            told,
            accumulate,
            before,
        )

    # ---- checkpoints -----------------------------------------------------------------------

    def save(self, trainer: Any, checkpoint: dict[str, Any]) -> None:
        """Add every rank's random states. A collective: all ranks save.

        States of loaders get a place of their own: other strategies, whose loaders have none, could
        not go on from the file.
        """
        states = random_states.gather_states()
        checkpoint[CHECKPOINT_KEY] = {
            "version": 1,
            "ranks": len(states),
            "states": [*states, *self._waiting_rng],
        }
        combined, loop = trainer.fit_loop._combined_loader, _fit_loop_of(checkpoint)
        if _LIGHTNINGS_KEY in loop and len(sharded_loaders(combined)) == len(combined.flattened):
            checkpoint[LOADERS_KEY] = loop.pop(_LIGHTNINGS_KEY)

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Keep the random states until training starts."""
        self._rng = checkpoint.get(CHECKPOINT_KEY)
        if LOADERS_KEY in checkpoint:
            _fit_loop_of(checkpoint)[_LIGHTNINGS_KEY] = checkpoint[LOADERS_KEY]

    def _restore_rng(self, trainer: Any) -> None:
        saved, self._rng = self._rng, None
        rank, world_size = self._ranks(trainer)
        self._waiting_rng = [] if saved is None else saved["states"][world_size:]
        if saved is None:
            return
        seed = torch.initial_seed() & 0x7FFFFFFF
        random_states.restore_rank(saved["states"], rank, seed, trainer.global_step)
        if world_size != saved["ranks"] and rank == 0:
            warnings.warn(
                f"the random states in the checkpoint are those of {saved['ranks']} ranks, this run"
                f" has {world_size}: dropout and main-process augmentation continue reproducibly,"
                f" ranks that are new from seeds derived from (seed={seed}, rank,"
                f" step={trainer.global_step}), but not as the original run would have. The order"
                " of samples and per-sample randomness are not affected.",
                stacklevel=2,
            )


# ---- the Trainer's loops, by attribute --------------------------------------------------------


def sharded_loaders(combined: Any) -> list[ShardedLoader]:
    """The loaders of a combined loader that are ours."""
    flattened = [] if combined is None else combined.flattened
    return [loader for loader in flattened if isinstance(loader, ShardedLoader)]


def _fit_loop_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})


def _stage(trainer: Any) -> Stage:
    stage = trainer.state.stage
    if stage is not None and stage.value == "sanity_check":
        return "sanity"
    name = "train" if stage is None else stage.value
    if name == "train":
        fit_loop = trainer.fit_loop
        # A restart can set up validation while the stage still says "train".
        if fit_loop._combined_loader is not None and not fit_loop._should_reload_train_dl:
            return "validate"
    return _STAGES[name]


def _held_by_fetcher(trainer: Any) -> int:
    """Batches that Lightning's fetcher keeps back to know which one is the last."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def _set_batches_done(progress: Any, batches: int) -> None:
    """Tell the loop how many batches of the epoch are done, counted in this run's batches."""
    current = progress.current
    # 1 if the checkpoint was made inside a batch's hooks
    unfinished = current.ready - current.completed
    current.ready = current.started = current.processed = batches
    current.completed = batches - unfinished


def _user_moves_batches(trainer: Any) -> bool:
    """Whether a hook of the user's expects the batch where the loader's workers left it."""
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device")
    owners = (trainer.lightning_module, trainer.datamodule)
    return any(
        _is_overridden(owner, name) for owner in owners if owner is not None for name in hooks
    )


def _is_overridden(owner: Any, name: str) -> bool:
    module = getattr(getattr(type(owner), name, None), "__module__", "lightning")
    return module.partition(".")[0] not in ("lightning", "pytorch_lightning")
