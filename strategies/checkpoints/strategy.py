"""The part of the strategy that saves and loads."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ..data import DataHooks
from ..engine import Zero3Engine, compare_notes, home_of
from ..launch.process_strategy import ProcessStrategy
from ..state_dicts.collective_errors import CheckpointError, together
from ..state_dicts.gather import gather_on_rank_zero
from ..state_dicts.gradients import load_gradients, sliced_gradients
from ..state_dicts.model_state import load_module, load_state_dict, own_values, sliced_state_dict
from ..state_dicts.optimizer_hooks import (
    NO_STATES,
    finish_loading,
    remarks_on_methods,
    require_as_many,
)
from ..state_dicts.optimizer_state import load_optimizer_state, numbered, sliced_optimizer_state
from ..state_dicts.slices import Flats
from . import full
from .background import BackgroundSave
from .options import CheckpointOptions
from .storage import Choice, choose, is_remote, point, retire

if TYPE_CHECKING:  # importing torch.distributed.checkpoint takes a while
    from .sharded import ShardedCheckpoint

# Our precision plugins save what Lightning's do, under the name that other strategies look for.
_SCALER, _OWN_SCALER = "MixedPrecision", "Zero3MixedPrecision"
_GRADIENTS = "zero3_gradients"
_LOCAL_ONLY = (
    "sharded checkpoints are folders of a file system that all ranks see, and take no storage"
    " options. Choose one, or single files:"
    " `Zero3Strategy(checkpoint=CheckpointOptions(kind='full'))`."
)


class CheckpointStrategy(ProcessStrategy):
    """Saves and loads what an engine holds."""

    engine: Zero3Engine | None
    _trainer: pl.Trainer
    _data: DataHooks
    _checkpoints: CheckpointOptions
    _groups: Any  # ParamGroups, which imports from here
    _gradients: Mapping[str, Tensor] | None = None  # loaded, of an accumulation window that goes on
    _background: BackgroundSave | None = None  # while the model is trained
    _source: ShardedCheckpoint | None = (
        None  # where a loaded checkpoint's tensors are still to be read
    )
    _group: dist.ProcessGroup | None = None  # of all ranks, when the model was sharded
    _weights: tuple[Mapping[str, Any], bool] | None = (
        None  # state dict to load once the model is sharded, and if strictly
    )

    def _follow_groups(self) -> None:
        """Bring the shards up to the optimizers' groups; collective."""
        raise NotImplementedError

    @override
    def setup_environment(self) -> None:
        """As the base.

        Raises:
            ValueError: a plugin is to write checkpoints that every rank writes its part of.
        """
        if (
            self._checkpoints.kind == "sharded"
            and type(self.checkpoint_io) is not TorchCheckpointIO
        ):
            raise ValueError(
                f"{type(self.checkpoint_io).__name__} writes single files, and zero3 writes sharded"
                " checkpoints: it would never be used. Choose"
                " `Zero3Strategy(checkpoint=CheckpointOptions(kind='full'))`, or leave the plugin"
                " out. `CheckpointOptions(background=True)` saves while training goes on."
            )
        super().setup_environment()

    def require_local_folders(self, trainer: pl.Trainer) -> None:
        """To be called before training: callbacks know their folders by now.

        Raises:
            ValueError: sharded checkpoints are to go where only single files can.
        """
        for callback in trainer.checkpoint_callbacks:
            folder = getattr(callback, "dirpath", None)
            if self._checkpoints.kind == "sharded" and folder is not None and is_remote(folder):
                raise ValueError(
                    f"{type(callback).__name__}(dirpath={os.fspath(folder)!r}): {_LOCAL_ONLY}"
                )

    # --------------------------------------------------------------------------------------- saving

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What a checkpoint is made of: a slice of each parameter, on all ranks."""
        assert self.lightning_module is not None
        return (
            self.lightning_module.state_dict() if self.engine is None else self.sliced_state_dict()
        )

    def sliced_state_dict(self, flats: Flats = own_values) -> dict[str, Any]:
        """The module's state dict with a slice of each parameter out of ``flats``; local."""
        assert self.engine is not None and self.lightning_module is not None
        return sliced_state_dict(self.engine, self.lightning_module, flats)

    def full_state_dict(self) -> dict[str, Any]:
        """The module's full state dict in CPU memory of rank 0, an empty one elsewhere; raises as
        :meth:`save_checkpoint`.
        """
        self._begin("Collecting the state dict")
        return gather_on_rank_zero(self.lightning_module_state_dict(), self.global_rank) or {}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """In torch's layout, by parameter name, with a slice of each tensor; collective."""
        self._begin("Saving a checkpoint")  # before the first exchange
        self._follow_groups()
        assert self.engine is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        index = self.optimizers.index(optimizer)
        owned = self._groups.owned(index)
        for told in remarks_on_methods(optimizer):
            rank_zero_warn(told)
        return sliced_optimizer_state(self.engine, index, optimizer, owned and owned.state)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, all ranks together.

        Raises:
            CheckpointError, DivergenceError: on all ranks, if it cannot be written, or they have
                parts of different models.
        """
        self._begin(f"Saving {filepath}")
        self._data.save(self._trainer, checkpoint)
        if "optimizer_states" in checkpoint:
            if not checkpoint["optimizer_states"] and self._trainer.global_step:
                rank_zero_warn(f"Saving {filepath}: {NO_STATES}")
            self._save_gradients(checkpoint)
        if _OWN_SCALER in checkpoint:
            checkpoint[_SCALER] = checkpoint.pop(_OWN_SCALER)
        filepath = self.broadcast(os.fspath(filepath))
        if self._checkpoints.kind == "sharded":
            self._save_sharded(checkpoint, filepath, storage_options)
        else:
            self._save_full(checkpoint, filepath, storage_options)

    def _begin(self, doing: str) -> None:
        """Before ranks put their parts together; collective. Without a process group each would
        take its part for the whole.
        """
        if self.engine is None:
            return
        if self.engine.collectives.world_size > 1 and self._group is not dist.group.WORLD:
            raise CheckpointError(
                f"{doing}: the ranks' process group has ended, as it does when an exception ends a"
                " run, so they cannot save together any more. `OnExceptionCheckpoint` and"
                " `ModelCheckpoint(save_on_exception=True)` save before that."
            )
        compare_notes(self.engine.collectives)

    def _save_gradients(self, checkpoint: dict[str, Any]) -> None:
        """In the middle of an accumulation window; collective. With manual optimization Lightning
        knows of none.
        """
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        done = progress.current.processed % self._trainer.accumulate_grad_batches
        closed = progress.is_last_batch and progress.current.processed == progress.current.ready
        if done == 0 or closed or self.engine is None:
            return
        if self._trainer.interrupted:
            rank_zero_warn(
                f"An exception ended training after {done} micro-batches of an accumulation window."
                " Their gradients are not in the checkpoint that is saved now: the first step of a"
                " run that resumes will lack them."
            )
        else:
            checkpoint[_GRADIENTS] = sliced_gradients(self.engine)

    def _save_full(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        if "optimizer_states" in checkpoint:
            checkpoint["optimizer_states"] = [
                numbered(state) for state in checkpoint["optimizer_states"]
            ]
        if (
            type(self.checkpoint_io) is TorchCheckpointIO
            and storage_options is None
            and not is_remote(path)
        ):
            return full.save(checkpoint, Path(path), self.global_rank)
        whole = gather_on_rank_zero(checkpoint, self.global_rank)
        if whole is not None:
            self.checkpoint_io.save_checkpoint(whole, path, storage_options=storage_options)

    def _save_sharded(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        if storage_options is not None or is_remote(path):
            raise ValueError(f"Saving {path}: {_LOCAL_ONLY}")
        from .writer import prepare, save

        self.finish_saving()
        prepared = prepare(checkpoint, Path(path))
        (save if self._background is None else self._background.start)(prepared)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is written in the background; collective.

        Raises:
            CheckpointError: it could not be written.
        """
        if self._background is not None:
            self._background.wait()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Report the end of a background save, on all ranks in the first step after any rank knows
        of it.
        """
        super().on_train_batch_start(batch, batch_idx)
        saving = self._background
        if saving is not None and saving.running:
            finished = torch.tensor([int(saving.finished())], device="cpu")
            if int(self.engine.collectives.agree(finished)):  # among hosts: no device is waited for
                saving.wait()

    @override
    def on_train_start(self) -> None:
        """From here to the end of training, saves go on in the background. Lightning has cleared
        all gradients by now.
        """
        super().on_train_start()
        gradients, self._gradients = self._gradients, None
        if gradients is not None:
            assert self.engine is not None
            reads = load_gradients(self.engine, gradients)
            if self._source is not None:
                self._source.read(reads)
        self._background = BackgroundSave() if self._checkpoints.background else None

    @override
    def on_train_end(self) -> None:
        """Training is over when its last checkpoint is written."""
        super().on_train_end()
        self.finish_saving()
        self._background = None

    @override
    def on_exception(self, exception: BaseException) -> None:
        """A save that failed meanwhile is told beside what ends the run, and not in its place."""
        super().on_exception(exception)
        try:
            self.finish_saving()
        except Exception as error:
            if error is not exception:
                warnings.warn(str(error), stacklevel=2)

    @override
    def teardown(self) -> None:
        self._weights = None
        try:
            self.finish_saving()  # one of a run that a tuner ended
        finally:
            self._background = None
            super().teardown()

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Delete a checkpoint; one that is deleted halfway is not taken for a checkpoint."""
        if not self.is_global_zero:
            return
        path = Path(filepath)
        if self._background is not None and self._background.running:
            self._background.afterwards(lambda: retire(path))
        elif path.is_dir():
            retire(path)
        else:
            self.checkpoint_io.remove_checkpoint(filepath)

    def link_checkpoint(self, path: _PATH, link: _PATH) -> None:
        """Make ``link`` lead to a checkpoint, once that is whole; local."""
        if not self.is_global_zero or os.path.abspath(path) == os.path.abspath(link):
            return
        if self._background is not None and self._background.running:
            self._background.afterwards(lambda: point(Path(link), Path(path)))
        else:
            point(Path(link), Path(path))

    # -------------------------------------------------------------------------------------- loading

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read what is small, and remember where the tensors are to be read; collective."""
        self.finish_saving()
        weights_only = self._checkpoints.weights_only if weights_only is None else weights_only
        self._source = None
        if is_remote(checkpoint_path) or type(self.checkpoint_io) is not TorchCheckpointIO:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        else:
            checkpoint = self._load_local(Path(checkpoint_path), weights_only)
        if _SCALER in checkpoint:
            checkpoint[_OWN_SCALER] = checkpoint[_SCALER]
        self._data.load(checkpoint)
        return checkpoint

    def _load_local(self, wanted: Path, weights_only: bool) -> dict[str, Any]:
        chosen = together(
            f"Loading {wanted}", lambda: self._choose(wanted) if self.is_global_zero else None
        )[0]
        assert chosen is not None
        for told in chosen.remarks:
            rank_zero_warn(told)
        try:
            if not chosen.path.is_dir():
                return full.load(chosen.path, weights_only)
            from .sharded import ShardedCheckpoint

            self._source = ShardedCheckpoint(chosen.path, weights_only)
            return self._source.checkpoint()
        except CheckpointError as error:
            raise CheckpointError(f"{str(error).rstrip('.')}. {chosen.other}") from error.__cause__

    def _choose(self, wanted: Path) -> Choice:
        """Lightning has turned "last" and "hpc" into paths already: they are what it would find
        again.
        """
        newest = {self._trainer._checkpoint_connector._hpc_resume_path}
        for callback in self._trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                newest |= callback._find_last_checkpoints(self._trainer)
            newest.add(getattr(callback, "ckpt_path", None))  # of OnExceptionCheckpoint
        return choose(
            wanted, os.path.normpath(wanted) in {os.path.normpath(path) for path in newest if path}
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load now: callbacks, which are next, and `configure_optimizers` may read the weights or
        replace them.

        Each rank reads its part where this strategy's engine still has the parameters, all of any
        other module, and of one on the meta device its part, as soon as that is sharded.
        """
        module, weights = self.lightning_module, (checkpoint["state_dict"], strict)
        assert module is not None
        if self.engine is not None and all(
            home_of(p) is self.engine.access for p in module.parameters()
        ):
            _tell_keys(*load_state_dict(self.engine, module, *weights, self._source))
        elif any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            self._weights = weights
        else:
            self.precision_plugin.convert_module(module)  # what is loaded may have more digits
            _tell_keys(*load_module(module, *weights, self._source))

    def _load_weights(self) -> None:
        """To be called when a run has sharded the model."""
        assert self.engine is not None and self.lightning_module is not None
        if self.engine.collectives.world_size > 1:  # one rank's would be in the way of a fork
            self._group = dist.group.WORLD
        if self._weights is not None:
            weights, self._weights = self._weights, None
            _tell_keys(*load_state_dict(self.engine, self.lightning_module, *weights, self._source))

    # -------------------------------------------------------------------------------- weights alone

    def load_weights(
        self, path: _PATH, key_mapping: Mapping[str, str] | None = None, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Start from the weights of another program; to be called by all ranks once the model is
        sharded (`on_fit_start`).

        Args:
            path: a safetensors file, its index or their folder; a checkpoint of any strategy; a
                state dict of ``torch.save``.
            key_mapping: regular expressions in the keys of the file -> what ``re.sub`` puts in
                their place, in order.
            strict: refuse missing and unexpected keys.

        Returns:
            keys that the model has and the file has not, and the other way round.

        Raises:
            CheckpointError: on all ranks, if it cannot be read.
            RuntimeError: keys with ``strict``, or shapes of parameters, do not fit; nothing was
                changed then.
        """
        if self.engine is None or self.lightning_module is None:
            raise RuntimeError(
                "`load_weights` needs the sharded model: call it in `on_fit_start` or later."
            )
        from .weights import open_weights, renamed

        state, source = open_weights(Path(path), self._checkpoints.weights_only)
        return load_state_dict(
            self.engine, self.lightning_module, renamed(state, key_mapping), strict, source
        )

    def save_weights(
        self,
        folder: _PATH,
        key_mapping: Mapping[str, str] | None = None,
        max_file_bytes: int = 5 * 10**9,
    ) -> None:
        """Write the weights as safetensors files with an index, as Hugging Face keeps them;
        collective.

        Args:
            folder: to write; what is there is replaced when all is written.
            key_mapping: regular expressions in the model's keys -> what ``re.sub`` puts in their
                place, in order.
            max_file_bytes: of a file, which is also what rank 0 holds in memory.
        """
        from .weights import renamed, save_weights

        self._begin(f"Saving {folder}")
        save_weights(
            renamed(self.lightning_module_state_dict(), key_mapping),
            Path(folder),
            max_file_bytes,
            self.global_rank,
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._follow_groups()
        assert self.engine is not None
        self._gradients = checkpoint.get(_GRADIENTS)
        states = checkpoint["optimizer_states"]
        require_as_many(states, self.optimizers)
        reads = []
        for index, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=False)):
            owned = self._groups.owned(index)
            wanted, remarks = load_optimizer_state(
                self.engine, index, optimizer, state, owned and owned.set_state
            )
            reads += wanted
            for told in (*remarks, *remarks_on_methods(optimizer)):
                rank_zero_warn(told)
        if self._source is not None:
            self._source.read(reads)
        for optimizer in self.optimizers if states else ():
            finish_loading(optimizer)


def _tell_keys(missing: list[str], unexpected: list[str]) -> None:
    if missing or unexpected:
        rank_zero_warn(
            f"The checkpoint has no {missing}; the model has no {unexpected}. `strict_loading` is"
            " off."
        )
