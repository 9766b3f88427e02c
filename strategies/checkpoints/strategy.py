"""The part of the strategy that saves and loads checkpoints."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import chain, compress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..collectives import Meeting
from ..data import DataHooks
from ..engine import Zero3Engine, compare_notes, owner_or_none
from ..launch.process_strategy import ProcessStrategy
from ..optimizers.param_groups import ParamGroups, whole_parameters
from ..state_dicts.collective_errors import CheckpointError, run_on_all_ranks
from ..state_dicts.gather import gather_on_rank_zero
from ..state_dicts.model_state import (
    compare_keys,
    load_module,
    load_state_dict,
    named_values,
    own_values,
    require_fit,
    sliced_state_dict,
)
from ..state_dicts.optimizer_hooks import (
    NO_STATES,
    finish_loading,
)
from ..state_dicts.optimizer_state import (
    load_optimizer_state,
    sliced_optimizer_state,
)
from ..state_dicts.slices import Shards
from ..support import give_back_memory
from . import single_file
from .background import BackgroundSave
from .frozen import BASE, exclude, frozen_names, require_base
from .options import CheckpointOptions
from .storage import is_remote, local, point, retire
from .weights import (
    MAX_FILE_BYTES,
    WeightsSave,
    open_checkpoint,
    open_weights,
    rename_keys,
)

_LOCAL_ONLY = (
    "sharded checkpoints, and those that are written in the background, lie on a file system that"
    " all ranks see, and take no storage options. Choose one, or the default,"
    " `Zero3Strategy(checkpoint=CheckpointOptions())`."
)


class CheckpointStrategy(ProcessStrategy):
    """Save and load the parameters and optimizer states of an engine."""

    engine: Zero3Engine | None
    _trainer: pl.Trainer
    _data: DataHooks
    _checkpoints: CheckpointOptions
    _groups: ParamGroups
    _background: BackgroundSave | None = None  # while the model is trained
    _group: dist.ProcessGroup | None = None  # of all ranks, when the model was sharded
    _pending_weights: Sequence[Mapping[str, Any]] = ()  # to load once the model is sharded
    _links: Set[Path] = frozenset()  # to checkpoints, that this run has made
    # names of what was frozen when the model was sharded and not trained since, to leave out
    _frozen: Set[str] = frozenset()

    def _follow_groups(self) -> None:
        """Shard anew if the optimizers' groups were edited; collective."""
        raise NotImplementedError

    @override
    def setup_environment(self) -> None:
        """Set up as the base does, and check the checkpoint plugin.

        Raises:
            ValueError: a plugin that writes single files is given, and would not be used.
        """
        if self._is_local_only and type(self.checkpoint_io) is not TorchCheckpointIO:
            raise ValueError(
                f"{type(self.checkpoint_io).__name__} would never be used, because zero3 itself"
                " writes sharded checkpoints, and those in the background. Choose"
                " `Zero3Strategy(checkpoint=CheckpointOptions())`, or leave the plugin out."
                " `CheckpointOptions(background=True)` saves while training goes on."
            )
        super().setup_environment()

    @property
    def _is_local_only(self) -> bool:
        """Whether every checkpoint is written by all ranks to a file system that they see."""
        return self._checkpoints.kind == "sharded" or self._checkpoints.background

    @property
    def leaves_weights_out(self) -> bool:
        """Whether checkpoints lack weights of the model."""
        return self._checkpoints.exclude_frozen

    def require_savable(self, trainer: Any) -> None:
        """Check what is known of checkpoints when training begins.

        Raises:
            ValueError: a folder is remote, and checkpoints of this kind cannot be written there; or
                frozen parameters are left out, and averages of all parameters are kept.
        """
        for callback in trainer.callbacks:
            if self._checkpoints.exclude_frozen and isinstance(callback, WeightAveraging):
                raise ValueError(
                    f"CheckpointOptions(exclude_frozen=True) with {type(callback).__name__}, whose"
                    " checkpoints have all parameters twice.\nLeave one of them out."
                )
        for callback in trainer.checkpoint_callbacks:
            folder = getattr(callback, "dirpath", None)
            if self._is_local_only and folder is not None and is_remote(folder):
                raise ValueError(
                    f"{type(callback).__name__}(dirpath={os.fspath(folder)!r}): {_LOCAL_ONLY}"
                )

    # --------------------------------------------------------------------------------------- saving

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict with a slice of each parameter, on all ranks."""
        assert self.lightning_module is not None
        if self.engine is None:
            return self.lightning_module.state_dict()
        return self.sliced_state_dict()

    def sliced_state_dict(self, shards: Shards = own_values) -> dict[str, Any]:
        """Return the module's state dict with slices of ``shards``; local."""
        assert self.engine is not None and self.lightning_module is not None
        return sliced_state_dict(self.engine, self.lightning_module, shards)

    def full_state_dict(self) -> dict[str, Any]:
        """Return the full state dict in CPU memory on rank 0, an empty one elsewhere; collective.

        Raises:
            CheckpointError, DivergenceError: as `save_checkpoint`.
        """
        self._require_all_ranks("Collecting the state dict")
        return gather_on_rank_zero(self.lightning_module_state_dict(), self.global_rank) or {}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state in torch's layout, by parameter name, with slices; collective."""
        # hazard: before the first exchange of the save, which without its process group would be
        # this rank's alone
        self._require_all_ranks("Saving a checkpoint")
        self._follow_groups()
        assert self.engine is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # of a LightningOptimizer
        _warn_of_methods(optimizer)
        step = self.engine.steps[optimizer]
        step.take_state()
        owned = whole_parameters(step)
        its = None if owned is None else owned.named(step.state, chain(*step.names()))
        return sliced_optimizer_state(step, its)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, all ranks together.

        A process that has run nothing itself, as after ``fit`` with processes of its own
        ("zero3_spawn", "zero3_notebook"), writes a full file.

        Raises:
            CheckpointError, DivergenceError: on all ranks, if the checkpoint cannot be written, or
                the ranks have parts of different models.
        """
        module = self.lightning_module
        if self.engine is None and (module is None or module._trainer is None):
            # No run in this process: nothing is sharded, and the module is whole.
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        self._require_all_ranks(f"Saving {filepath}")
        self._data.save(self._trainer, checkpoint)
        if checkpoint.get("optimizer_states") == [] and self._trainer.global_step:
            rank_zero_warn(f"Saving {filepath}: {NO_STATES}")
        if self._checkpoints.exclude_frozen and self.engine is not None:
            assert module is not None
            exclude(checkpoint, self._frozen & frozen_names(module))
        filepath = self.broadcast(filepath)
        is_local = storage_options is None and not is_remote(filepath)
        if self._is_local_only and not is_local:
            raise ValueError(f"Saving {filepath}: {_LOCAL_ONLY}")
        self.finish_saving()
        if self._checkpoints.kind == "sharded":
            from .writer import ShardedSave

            self._write(ShardedSave(checkpoint, Path(filepath)))
            return
        single_file.number_states(checkpoint)
        if is_local and type(self.checkpoint_io) is TorchCheckpointIO:
            self._write(single_file.FileSave(checkpoint, Path(filepath), self.replica))
            return
        content = gather_on_rank_zero(checkpoint, self.global_rank)

        def write() -> None:
            if content is not None:
                self.checkpoint_io.save_checkpoint(content, filepath, storage_options)

        run_on_all_ranks(f"Saving {filepath}", write)

    @property
    def replica(self) -> tuple[int, int]:
        """Of which replica of the shards this rank has a part, and of how many."""
        if self.engine is None:
            return 0, 1
        shards = self.engine.collectives.world_size
        return self.global_rank // shards, self.world_size // shards

    def _write(self, save: Any) -> None:
        if self._background is None:
            save.write()
        else:
            self._background.start(save)

    def _require_all_ranks(self, action: str) -> None:
        """Check that all ranks can put their parts of one model together; collective.

        Args:
            action: what the ranks are going to do, for the error: "Saving /a/b.ckpt".

        Raises:
            CheckpointError: the process group of the run has ended.
            DivergenceError: the ranks changed weights or stepped in different ways.
        """
        if self.engine is None:
            return
        # hazard: without its process group each rank would save its part as the whole model
        if self.engine.collectives.world_size > 1 and self._group is not dist.group.WORLD:
            raise CheckpointError(
                f"{action}: the ranks' process group has ended, as it does when an exception ends a"
                " run, so they cannot save together any more. `OnExceptionCheckpoint` and"
                " `ModelCheckpoint(save_on_exception=True)` save before that."
            )
        self.engine.collectives.meet(Meeting.SAVE)
        compare_notes(self.engine.collectives)

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is written in the background; collective.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        if self._background is not None:
            self._background.wait()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        """Note which parameters are trained, as they may be frozen when a checkpoint is saved."""
        super().post_backward(closure_loss)
        if self._frozen:
            assert self.engine is not None
            gradients = self.engine.gradients
            self._frozen -= {entry.name for entry in compress(gradients.trained, gradients.used)}

    @override
    def on_train_start(self) -> None:
        """Let saves run in the background from now on."""
        super().on_train_start()
        self._background = BackgroundSave() if self._checkpoints.background else None

    @override
    def on_train_end(self) -> None:
        """Wait for the last checkpoint before training is over."""
        super().on_train_end()
        self.finish_saving()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Wait for a save in flight; its failure is a warning beside the run's own error."""
        super().on_exception(exception)
        try:
            self.finish_saving()
        except Exception as error:
            if error is not exception:
                warnings.warn(str(error), stacklevel=2)

    @override
    def teardown(self) -> None:
        """Finish what is in flight (a tuner ends a run without ``on_train_end``) and tear down."""
        background, self._background, self._pending_weights = self._background, None, ()
        try:
            if background is not None:
                background.close()
        finally:
            super().teardown()

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Delete a checkpoint, once a save in flight is complete; local.

        An interruption leaves nothing that looks like a checkpoint.
        """
        if not self.is_global_zero:
            return
        if is_remote(filepath) or type(self.checkpoint_io) is not TorchCheckpointIO:
            self.checkpoint_io.remove_checkpoint(filepath)
        else:
            self._after_save(lambda: retire(Path(filepath), self._links))

    def link_checkpoint(self, path: _PATH, link: _PATH) -> None:
        """Make ``link`` lead to a checkpoint, once a save in flight is complete; local."""
        if self.is_global_zero and os.path.abspath(path) != os.path.abspath(link):
            self._links |= {Path(link)}
            self._after_save(lambda: point(Path(link), Path(path)))

    def _after_save(self, change: Callable[[], None]) -> None:
        if self._background is None:
            change()
        else:
            self._background.change_after_save(change)

    # -------------------------------------------------------------------------------------- loading

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read everything but tensors, which are read when they are loaded; collective."""
        self.finish_saving()
        weights_only = self._checkpoints.weights_only if weights_only is None else weights_only
        if is_remote(checkpoint_path) or type(self.checkpoint_io) is not TorchCheckpointIO:
            checkpoint = {}
            load = super().load_checkpoint
            run_on_all_ranks(
                f"Loading {checkpoint_path}",
                lambda: checkpoint.update(load(checkpoint_path, weights_only)),
            )
        else:
            # each rank has looked for "last" itself
            checkpoint = open_checkpoint(Path(self.broadcast(checkpoint_path)), weights_only)
        self._data.load(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights now, if the module has memory for them; collective.

        Callbacks, which load next, and `configure_optimizers` may read the weights or replace them.

        Each rank reads its part if the engine still has the parameters. A module on the meta device
        is loaded when it is sharded, also by parts. Any other module is loaded in full.
        """
        module, state = self.lightning_module, checkpoint["state_dict"]
        assert module is not None
        base = checkpoint.get(BASE)
        if base is None:
            self._pending_weights = ()
        else:
            require_base(module, base, self.pending_keys())
            missing, unexpected = compare_keys(named_values(module), state)
            require_fit(module, [key for key in missing if key not in base], unexpected, strict)
        self._load_state(state, strict and base is None)

    def _load_state(self, state: Mapping[str, Any], strict: bool) -> None:
        """Load weights into shards or a module with memory, or let them wait for the shards."""
        module = self.lightning_module
        assert module is not None
        if self._has_shards(module):
            assert self.engine is not None
            load_state_dict(self.engine, module, state, strict)
        elif any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            missing, unexpected = compare_keys(named_values(module), state)
            require_fit(module, missing, unexpected, strict)
            fitting = {key: value for key, value in state.items() if key not in unexpected}
            self._pending_weights = [*self._pending_weights, fitting]
        else:
            # before loading, which then converts from the digits in the file
            self.precision_plugin.convert_module(module)
            load_module(module, state, strict)

    def _has_shards(self, module: nn.Module) -> bool:
        return self.engine is not None and all(
            owner_or_none(p) is self.engine for p in module.parameters()
        )

    def pending_keys(self) -> set[str]:
        """Return the keys of weights that wait for the model to be sharded."""
        return {key for state in self._pending_weights for key in state}

    def _load_weights(self) -> None:
        """Load weights that waited for the model to be sharded; to be called then; collective."""
        assert self.engine is not None and self.lightning_module is not None
        # A group of one rank is not kept: it would be in the way of a later fork, which lacks its
        # threads (see `ProcessStrategy._configure_launcher`).
        if self.engine.collectives.world_size > 1:
            self._group = dist.group.WORLD
        if self._checkpoints.exclude_frozen:
            self._frozen = frozen_names(self.lightning_module)
        names = named_values(self.lightning_module)
        for state in self._pending_weights:
            # hazard: a renamed layer would be initialised anew, and nobody told
            if lost := compare_keys(names, state)[1]:
                raise CheckpointError(
                    f"Weights of {lost[0]!r} (and {len(lost) - 1} more) were loaded into a model on"
                    " the meta device, which has no such name any more.\nLoad them after the last"
                    " change of names (`get_peft_model` is one)."
                )
            load_state_dict(self.engine, self.lightning_module, state, False)
        self._pending_weights = ()
        give_back_memory()

    # -------------------------------------------------------------------------------- weights alone

    def load_weights(
        self, path: _PATH, key_mapping: Mapping[str, str] | None = None, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load the weights of another program; collective.

        Each rank reads its part alone, if the model is sharded, or on the meta device: call it in
        `configure_model` once the model is made there, in `setup`, `on_fit_start` or later.
        Weights of a checkpoint that the run goes on from take precedence over those that are loaded
        before the model is sharded.

        Args:
            path: a safetensors file, its index or their folder; a checkpoint of any strategy; a
                state dict of ``torch.save``.
            key_mapping: pattern -> replacement, which ``re.sub`` applies to the keys of the file in
                order.
            strict: refuse missing and unexpected keys.

        Returns:
            keys that only the model has, and keys that only the file has.

        Raises:
            CheckpointError: on all ranks, if ``path`` cannot be read.
            RuntimeError: keys with ``strict``, or shapes of parameters, do not fit, and nothing was
                changed.
        """
        module = self.lightning_module
        assert module is not None
        content = open_weights(local(path), self._checkpoints.weights_only)
        state = rename_keys(content, key_mapping)
        missing, unexpected = compare_keys(named_values(module), state)
        require_fit(module, missing, unexpected, strict)
        self._load_state(state, False)
        give_back_memory()
        return missing, unexpected

    def save_weights(
        self,
        folder: _PATH,
        key_mapping: Mapping[str, str] | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Write the weights as safetensors files with an index, as Hugging Face does; collective.

        Each rank writes its own part. Of tied weights the first is written, as Hugging Face does.

        Args:
            folder: receives the files when all are written: they are in a folder
                `.zero3-unfinished-*` of it until then. Other files in it stay.
            key_mapping: pattern -> replacement, which ``re.sub`` applies to the model's keys in
                order: ``{r"^model\\.": ""}`` for a model of Hugging Face's in ``self.model``.
            max_file_bytes: the most bytes of a file.
        """
        self._require_all_ranks(f"Saving {folder}")
        state = rename_keys(self.lightning_module_state_dict(), key_mapping)
        WeightsSave(state, local(folder), self.replica, max_file_bytes).write()

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of each optimizer's state; collective.

        Raises:
            ValueError: the states do not fit the optimizers.
        """
        self._follow_groups()
        assert self.engine is not None
        states = single_file.named_states(checkpoint)
        if states and len(states) != len(self.optimizers):
            raise ValueError(
                f"The checkpoint has the states of {len(states)} optimizers, and"
                f" `configure_optimizers` returns {len(self.optimizers)}.\nReturn as many, or start"
                ' all anew: in `on_load_checkpoint`, `checkpoint["optimizer_states"] = []` and'
                ' `checkpoint["lr_schedulers"] = []`.'
            )
        for index, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=False)):
            _warn_of_methods(optimizer)
            step = self.engine.steps[optimizer]
            is_whole = whole_parameters(step) is not None
            for remark in load_optimizer_state(step, state, index, is_whole):
                rank_zero_warn(remark)
        give_back_memory()
        for optimizer in self.optimizers if states else ():
            finish_loading(self.engine.steps[optimizer])


def _warn_of_methods(optimizer: Optimizer) -> None:
    """Warn if an optimizer's class overrides how states are saved or loaded."""
    cls = type(optimizer)
    own = [
        name
        for name in ("state_dict", "load_state_dict")
        if getattr(cls, name) is not getattr(Optimizer, name)
    ]
    if own:
        rank_zero_warn(
            f"{cls.__name__} has its own {' and '.join(f'`{name}`' for name in own)}, which zero3"
            " does not call: only `state` and `param_groups` of optimizers are saved and loaded.\n"
            "Keep what belongs to no parameter in `state`, under a string, and adjust what was"
            " loaded in `__setstate__`."
        )
