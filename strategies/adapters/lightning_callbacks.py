"""Callbacks of Lightning that reach for weights, param groups or checkpoints' names themselves,
made to work on shards.

The class of such a callback is switched to a subclass that goes through the strategy; for Lightning
and in checkpoints it keeps its name.
"""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partialmethod
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
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
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from ..collectives import DivergenceError
from ..engine import Zero3Engine
from .weight_averages import ShardedAverage, ShardedModel, Shards, require_elementwise_average


class _Finetuning(BaseFinetuning):
    """Looks the parameters of param groups up in the module, and adds some."""

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with trainer.strategy.param_groups():
            super().on_fit_start(trainer, pl_module)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        with trainer.strategy.param_groups():
            super().on_train_epoch_start(trainer, pl_module)


class _Averaging(Callback):
    """Averages shards. The average exists from the strategy's set-up on; a checkpoint that came
    earlier waits for it.

    Subclasses make the average (``_new_average``), load it (``_take``), and average whole models to
    be tried (``_average_of``).
    """

    _loaded: Any = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._average_model = None

    def start_average(self, model: ShardedModel) -> None:
        require_elementwise_average(type(self).__name__, self._average_of)
        self._average_model = self._new_average(model)
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            self._take(loaded)

    def follow(self, old: Zero3Engine, new: Zero3Engine) -> None:
        self._average_model.follow(old, new)


class _WeightAveraging(_Averaging, WeightAveraging):
    def _new_average(self, model: ShardedModel) -> ShardedAverage:
        device = self._device or model.engine.device
        return ShardedAverage(Shards(model), device, use_buffers=self._use_buffers, **self._kwargs)

    def _take(self, loaded: tuple[pl.Trainer, pl.LightningModule, dict[str, Any]]) -> None:
        self.on_load_checkpoint(*loaded)

    def _average_of(self, models: list[nn.Module]) -> Iterator[Tensor]:
        average = AveragedModel(models[0], **self._kwargs)
        for model in models:
            average.update_parameters(model)
        return average.module.parameters()

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._average_model is None and trainer.state.fn == TrainerFn.FITTING:
            self._loaded = trainer, pl_module, checkpoint
        else:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    @override
    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        self._average_model.module.exchange()

    @override
    def _copy_average_to_current(self, pl_module: pl.LightningModule) -> None:
        self._average_model.module.store(buffers=True)


class _StochasticWeightAveraging(_Averaging, StochasticWeightAveraging):
    """The older callback, whose average is a plain copy of the module."""

    def _new_average(self, model: ShardedModel) -> Shards:
        return deepcopy(Shards(model))

    def _take(self, loaded: dict[str, Any]) -> None:
        self._average_model.load_state_dict(loaded)

    def _average_of(self, models: list[nn.Module]) -> Iterator[Tensor]:
        average = deepcopy(models[0])
        n_averaged = torch.tensor(0)
        for model in models:
            StochasticWeightAveraging.update_parameters(average, model, n_averaged, self._avg_fn)
        return average.parameters()

    @override
    def _load_average_model_state(self, model_state: Any) -> None:
        if self._average_model is None:
            self._loaded = model_state
        else:
            super()._load_average_model_state(model_state)

    @staticmethod
    @override
    def update_parameters(
        average_model: Shards, model: pl.LightningModule, n_averaged: Tensor, avg_fn: Any
    ) -> None:
        StochasticWeightAveraging.update_parameters(
            average_model, average_model.current(), n_averaged, avg_fn
        )

    @staticmethod
    @override
    def transfer_weights(src_pl_module: Shards, dst_pl_module: pl.LightningModule) -> None:
        src_pl_module.store(buffers=False)


class _Pruning(ModelPruning):
    """Sees the weights that it prunes whole, and gives rank 0's masks to all ranks.

    Torch prunes a parameter under its old identity, by another name: the shards stay, and the masks
    are buffers.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._strategy = trainer.strategy
        # A lottery ticket copies the layers, which are shards if the trainer has trained them
        # before.
        with self._strategy.gathered() if self._use_lottery_ticket_hypothesis else nullcontext():
            super().setup(trainer, pl_module, stage)

    @override
    def apply_pruning(self, amount: int | float) -> None:
        with self._strategy.gathered(self._pruned(), modify=True):
            for module, name in self._parameters_to_prune:
                for hook in (
                    h
                    for h in module._forward_pre_hooks.values()
                    if isinstance(h, BasePruningMethod)
                ):
                    # Torch ranks what the last forward has left, which are rounded values here.
                    if hook._tensor_name == name and self._strategy.engine.rounds(
                        module._parameters[f"{name}_orig"]
                    ):
                        setattr(module, name, hook.apply_mask(module))
            super().apply_pruning(amount)
            for module, name in self._parameters_to_prune:
                mask = module._buffers.get(f"{name}_mask")
                if mask is not None:
                    mask.copy_(self._strategy.engine.collectives.broadcast(mask.contiguous()))

    @override
    def apply_lottery_ticket_hypothesis(self) -> None:
        with self._strategy.gathered(self._pruned(), modify=True):
            super().apply_lottery_ticket_hypothesis()

    @override
    def make_pruning_permanent(self, module: nn.Module) -> None:
        hooks = [
            (m, h)
            for m in module.modules()
            for h in m._forward_pre_hooks.values()
            if isinstance(h, BasePruningMethod)
        ]
        # by others than this callback, too
        pruned = [m._parameters.get(f"{hook._tensor_name}_orig") for m, hook in hooks]
        with self._strategy.gathered([p for p in pruned if p is not None], modify=True):
            super().make_pruning_permanent(module)

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        parameters, state = (
            dict(pl_module.named_parameters(remove_duplicate=False)),
            checkpoint["state_dict"],
        )
        names = [key.removesuffix("_mask") for key in state if key.endswith("_mask")]
        masked = [name for name in names if f"{name}_orig" in parameters]
        for name in masked if self._make_pruning_permanent else ():
            original, mask = parameters[f"{name}_orig"], state.pop(f"{name}_mask")
            del state[f"{name}_orig"]
            with self._strategy.gathered([original]):
                state[name] = (mask.to(original) * original.detach()).cpu()

    def _pruned(self) -> list[nn.Parameter]:
        found = [
            m._parameters.get(f"{name}_orig", m._parameters.get(name))
            for m, name in self._parameters_to_prune
        ]
        return [p for p in found if p is not None]


class _SavesOnException(Checkpoint):
    """Saves where all ranks end alike. One alone would wait for the others, which run on, and hide
    what went wrong.
    """

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        why = f"not all ranks end here with a {type(exception).__name__}."
        try:
            if trainer.strategy.ends_alike(exception):
                return super().on_exception(trainer, pl_module, exception)
        except DivergenceError as parted:  # on all ranks; what ended the run is to be told, too
            why = str(parted)
        warnings.warn(f"{type(self).__name__} saves nothing: {why}", stacklevel=2)


class _OnExceptionCheckpoint(_SavesOnException, OnExceptionCheckpoint):
    pass


class _ModelCheckpoint(_SavesOnException, ModelCheckpoint):
    """`save_last="link"`: the link leads to something at any moment, and to a checkpoint that is
    whole.
    """

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self._should_save_on_exception(trainer):
            super().on_exception(trainer, pl_module, exception)
        else:  # a user's own is called, and nobody is waited for
            super(_SavesOnException, self).on_exception(trainer, pl_module, exception)

    @staticmethod
    @override
    def _link_checkpoint(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
        trainer.strategy.link_checkpoint(filepath, linkpath)
        trainer.strategy.barrier()


_ADAPTED: dict[type[Callback], type] = {
    ModelCheckpoint: _ModelCheckpoint,
    OnExceptionCheckpoint: _OnExceptionCheckpoint,
    BaseFinetuning: _Finetuning,
    ModelPruning: _Pruning,
    WeightAveraging: _WeightAveraging,
    StochasticWeightAveraging: _StochasticWeightAveraging,
}


_REFUSED: dict[type[Callback], str] = {
    BatchSizeFinder: (
        "tries sizes until a process is out of memory, which the other ranks would wait for:"
        " Lightning allows it with no distributed strategy. Try each size in a short run of its own"
        " (`Trainer(max_steps=3)`), with `CUDAMemoryTracker` to see what it takes."
    ),
}


def adapt(callbacks: Sequence[Callback]) -> None:
    """Switch the classes of those callbacks that need it.

    Raises:
        ValueError: a callback that cannot work.
    """
    for callback in callbacks:
        for base, reason in _REFUSED.items():
            if isinstance(callback, base):
                raise ValueError(f"{type(callback).__name__} {reason}")
        cls: Any = type(callback)
        for base, adapted in _ADAPTED.items():
            if isinstance(callback, base) and not isinstance(callback, adapted):
                # `state_key` is made of it
                names = {
                    "__module__": cls.__module__,
                    "__qualname__": cls.__qualname__,
                }
                callback.__class__ = type(
                    cls.__name__,
                    (adapted, cls),
                    {**names, "__reduce_ex__": partialmethod(_reduce, cls)},
                )


def _reduce(callback: Callback, cls: type[Callback], protocol: int) -> Any:
    """Pickled, and copied, it is of the user's class ``cls``, which can be found by its name; a
    Trainer adapts it anew.
    """
    make, given, *rest = cls.__reduce_ex__(callback, protocol)
    given = tuple(cls if value is type(callback) else value for value in given)
    # pickle looks at what that one makes
    return (
        cls.__new__ if make is copyreg.__newobj__ else make,
        given,
        *rest,
    )


def start_averages(model: ShardedModel, callbacks: Sequence[Callback]) -> None:
    """The model has been sharded for training: callbacks that average weights begin."""
    for callback in callbacks:
        if isinstance(callback, _Averaging):
            callback.start_average(model)


def follow(callbacks: Sequence[Callback], old: Zero3Engine, new: Zero3Engine) -> None:
    """The model has been sharded anew; collective."""
    for callback in callbacks:
        if isinstance(callback, _Averaging):
            callback.follow(old, new)
