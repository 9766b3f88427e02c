"""Adapts Lightning's callbacks that use weights, param groups or checkpoint paths by themselves.

Such a callback gets another class. Its bases are a class of ours that changes what the user's
methods are called with, the user's class, and a class of ours that replaces methods of Lightning's,
which the user's still override. For Lightning and in checkpoints it keeps its name.
"""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial, partialmethod
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from typing_extensions import override

from ..collectives import DivergenceError
from ..engine import Zero3Engine
from .weight_averages import ShardedAverage, Shards, require_elementwise


def _strategy(trainer: pl.Trainer) -> Any:
    return trainer.strategy  # a `Zero3Strategy`, which this room may not import


class _Averaging(Callback):
    """Averages shards, in place of Lightning's methods.

    The average, which ``_make_average`` of subclasses makes, exists from the strategy's set-up on.
    What a checkpoint that Lightning loads earlier has for it is loaded then.
    """

    _average_model: Any  # after set-up
    _make_average: Any
    _function: Any  # computes the average; None for that of `AveragedModel`
    _load: Callable[[], None] | None  # loads the state of an average, as soon as there is one

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._average_model = self._load = None

    def start_average(self, model: Any) -> None:
        """Make the average of ``model``, and load the state that a checkpoint has for it."""
        if self._function is not None:
            require_elementwise(self._function, type(self).__name__)
        self._average_model = self._make_average(model)
        if self._load is not None:
            self._load()
        self._load = None

    def move_average(self, old: Zero3Engine, new: Zero3Engine) -> None:
        """Shard the average as ``new`` shards the module; collective."""
        self._average_model.reshard(old, new)


class _WeightAveraging(_Averaging, WeightAveraging):
    @property
    def _function(self) -> Any:
        return self._kwargs.get("avg_fn")

    def _make_average(self, model: Any) -> ShardedAverage:
        device = self._device or model.engine.device
        return ShardedAverage(Shards(model), device, use_buffers=self._use_buffers, **self._kwargs)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        load = partial(super().on_load_checkpoint, trainer, pl_module, checkpoint)
        if self._average_model is None and trainer.state.fn == TrainerFn.FITTING:
            self._load = load
        else:
            load()

    @override
    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        self._average_model.module.swap_values()

    @override
    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        self._average_model.module.write_to_module()


class _StochasticWeightAveraging(_Averaging, StochasticWeightAveraging):
    """The older callback, whose average is a plain copy of the module."""

    @property
    def _function(self) -> Any:
        return self._avg_fn

    def _make_average(self, model: Any) -> Shards:
        return deepcopy(Shards(model))

    @override
    def _load_average_model_state(self, model_state: Any) -> None:
        load = partial(super()._load_average_model_state, model_state)
        if self._average_model is None:
            self._load = load
        else:
            load()


class _AverageOfShards(StochasticWeightAveraging):
    """Hands over shards in place of the module; to be called by Lightning before the user's."""

    @override
    def update_parameters(  # type: ignore[override]  # a static method of Lightning's
        self, average_model: Any, model: pl.LightningModule, n_averaged: Tensor, avg_fn: Any
    ) -> None:
        super().update_parameters(
            average_model, average_model.shards_of_module(), n_averaged, avg_fn
        )

    @override
    def transfer_weights(  # type: ignore[override]  # a static method of Lightning's
        self, src_pl_module: Any, dst_pl_module: pl.LightningModule
    ) -> None:
        super().transfer_weights(src_pl_module, src_pl_module.shards_of_module())
        src_pl_module.weights_changed()


class _Pruning(ModelPruning):
    """Gives rank 0's masks to all ranks.

    `torch.nn.utils.prune` keeps the same parameter under another name (``weight_orig``): the shards
    stay as they are, and the masks are buffers.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._strategy = _strategy(trainer)
        super().setup(trainer, pl_module, stage)

    @override
    def apply_pruning(self, amount: int | float) -> None:
        engine = self._strategy.engine
        for module, name in self._parameters_to_prune:
            for hook in module._forward_pre_hooks.values():
                if not isinstance(hook, BasePruningMethod) or hook._tensor_name != name:
                    continue
                # `BasePruningMethod.apply` ranks the values that the last forward left in
                # `module.<name>`, which are rounded where the engine rounds.
                if engine.rounds(module._parameters[f"{name}_orig"]):
                    setattr(module, name, hook.apply_mask(module))
        super().apply_pruning(amount)
        for module, name in self._parameters_to_prune:
            mask = module._buffers.get(f"{name}_mask")
            if mask is not None:
                mask.copy_(engine.collectives.broadcast(mask.contiguous()))

    @override
    def _copy_param(  # type: ignore[override]  # a static method of Lightning's
        self, new: nn.Module, old: nn.Module, name: str
    ) -> None:
        # What `old` has this rank initialized, before the run or now: rank 0's counts.
        source = getattr(old, name)
        source.data = self._strategy.broadcast(source.data)
        super()._copy_param(new, old, name)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self._make_pruning_permanent:
            return
        parameters = dict(pl_module.named_parameters(remove_duplicate=False))
        state = checkpoint["state_dict"]
        names = [key.removesuffix("_mask") for key in state if key.endswith("_mask")]
        for name in names:
            if f"{name}_orig" not in parameters:
                continue
            original, mask = parameters[f"{name}_orig"], state.pop(f"{name}_mask")
            del state[f"{name}_orig"]
            state[name] = (mask.to(original) * original.detach()).cpu()


class _SavesOnException(Checkpoint):
    """Saves after an error that all ranks have at the same place.

    hazard: a rank that saved alone would wait for the others, which run on, and hide the error.
    """

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # `ModelCheckpoint` has a choice. No rank waits for others where it saves nothing.
        saves = getattr(self, "_should_save_on_exception", lambda trainer: True)(trainer)
        reason = f"not all ranks end here with a {type(exception).__name__}."
        try:
            if not saves or _strategy(trainer).can_save_after(exception):
                return super().on_exception(trainer, pl_module, exception)
        except DivergenceError as divergence:
            # All ranks get it. A warning leaves the error that ended the run to be raised.
            reason = str(divergence)
        warnings.warn(f"{type(self).__name__} saves nothing: {reason}", stacklevel=2)


class _ModelCheckpoint(_SavesOnException, ModelCheckpoint):
    """Sets the link of `save_last="link"` in one step, once the checkpoint is complete.

    `ModelCheckpoint._link_checkpoint` removes the old link before it makes the new one.
    """

    @staticmethod
    @override
    def _link_checkpoint(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        _strategy(trainer).link_checkpoint(filepath, linkpath)
        trainer.strategy.barrier()


# Lightning's class -> ours before and after the user's class.
_ADAPTERS: dict[type[Callback], tuple[type | None, type | None]] = {
    ModelCheckpoint: (_ModelCheckpoint, None),
    OnExceptionCheckpoint: (_SavesOnException, None),
    ModelPruning: (None, _Pruning),
    WeightAveraging: (None, _WeightAveraging),
    StochasticWeightAveraging: (_AverageOfShards, _StochasticWeightAveraging),
}


def adapt(callbacks: Sequence[Callback]) -> None:
    """Give each callback that needs it an adapted class."""
    for callback in callbacks:
        cls: Any = type(callback)
        for base, (before, after) in _ADAPTERS.items():
            if isinstance(callback, base) and not isinstance(callback, before or after or base):
                theirs = None if after is not None and issubclass(after, cls) else cls
                namespace = {
                    "__module__": cls.__module__,
                    # `Callback.state_key` returns it.
                    "__qualname__": cls.__qualname__,
                    "__reduce_ex__": partialmethod(_pickle_as, cls),
                }
                bases = tuple(part for part in (before, theirs, after) if part is not None)
                callback.__class__ = type(cls.__name__, bases, namespace)


def _pickle_as(callback: Callback, cls: Any, protocol: int) -> Any:
    """Pickle or copy ``callback`` as an object of the user's class ``cls``.

    Pickle can find ``cls`` by its name. The next Trainer adapts the copy anew.
    """
    make, arguments, *rest = cls.__reduce_ex__(callback, protocol)
    arguments = tuple(cls if value is type(callback) else value for value in arguments)
    # For `copyreg.__newobj__` pickle would compare the class with that of ``callback``.
    is_new = make is copyreg.__newobj__  # type: ignore[attr-defined]  # typeshed lacks it
    return cls.__new__ if is_new else make, arguments, *rest


def start_averages(model: Any, callbacks: Sequence[Callback]) -> None:
    """Start the averages of callbacks that average weights, after ``model`` has been sharded."""
    for callback in callbacks:
        if isinstance(callback, _Averaging):
            callback.start_average(model)


def move_averages(callbacks: Sequence[Callback], old: Zero3Engine, new: Zero3Engine) -> None:
    """Shard averages as ``new`` shards the model, instead of ``old``; collective."""
    for callback in callbacks:
        if isinstance(callback, _Averaging):
            callback.move_average(old, new)
