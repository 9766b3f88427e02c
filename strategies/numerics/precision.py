"""Lightning's precision plugins for sharded gradients: they clip by a norm over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from copy import copy
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any, Literal

import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    Precision,
)
from lightning.pytorch.plugins.precision import MixedPrecision as LightningMixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ..engine import OptimizerStep

# Modules that autocast runs in the lower precision anyway (torch.amp's op reference), so that
# gathering their weights in it changes no number.
_CAST_MODULES = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

WireDtype = Literal["bf16"]
StepOf = Callable[[Optimizer], OptimizerStep]  # what knows an optimizer's shards


def _holders(gradients: Sequence[Tensor]) -> list[Any]:
    """What torch changes the gradients of in place, as if they were parameters."""
    return [SimpleNamespace(grad=gradient) for gradient in gradients]


class _ShardedClipping(Precision):
    """Clips by the norm of the whole gradient, of which each rank has a part."""

    _step_of: StepOf

    @override
    def main_params(self, optimizer: Optimizer) -> Any:
        """Return what `Precision.clip_grad_by_value` of Lightning clips."""
        return _holders(self._step_of(optimizer).parts_of_gradients())

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale gradients so that their 2-norm over all ranks is at most ``clip_val``.

        The factor is that of ``torch.nn.utils.clip_grad_norm_``.
        """
        step = self._step_of(optimizer)
        factor = torch.clamp(clip_val / (step.gradient_norm() + 1e-6), max=1.0)
        gradients = step.parts_of_gradients()
        for device in {grad.device for grad in gradients}:  # offload has two
            its = [grad for grad in gradients if grad.device == device]
            here = factor.to(device)
            # In host memory most steps are spared a pass over gradients; a device would be waited
            # for.
            if device.type != "cpu" or here != 1:
                torch._foreach_mul_(its, here)


class Zero3Precision(_ShardedClipping, Precision):
    """The plugin of ``32-true``."""


class MixedPrecision(_ShardedClipping, LightningMixedPrecision):
    """The plugin of ``bf16-mixed`` and ``16-mixed``: fp32 shards, and autocast.

    Lightning takes the name of the class for the key of the scaler's state in checkpoints. It is
    that of Lightning's own, so that other strategies find the state.

    Weights are gathered in the lower precision. With ``16-mixed`` all ranks agree on whether a step
    has finite gradients, and skip it if not. Learning-rate schedulers go on, as Lightning has it.
    """

    @override
    def connect(self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list) -> Any:
        for optimizer in optimizers:
            # A fused optimizer would unscale gradients itself, without knowing of infinities on
            # other ranks; and Lightning would refuse to clip them.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return super().connect(model, optimizers, lr_schedulers)


class Zero3HalfPrecision(_ShardedClipping, HalfPrecision):
    """The plugin of ``bf16-true`` and ``16-true``: shards in the lower precision.

    Gradients are summed over ranks in fp32.
    """


class Zero3DoublePrecision(_ShardedClipping, DoublePrecision):
    """The plugin of ``64-true``."""


_SHARDED: dict[type[Precision], type[Precision]] = {
    Precision: Zero3Precision,
    LightningMixedPrecision: MixedPrecision,
    HalfPrecision: Zero3HalfPrecision,
    DoublePrecision: Zero3DoublePrecision,
}


def _sharded_scaler(
    scaler: torch.amp.GradScaler, device: str, step_of: StepOf
) -> torch.amp.GradScaler:
    """Return a scaler with the same settings that unscales shards, and checks for infinities over
    all ranks.
    """
    # Imported here, as the import loads all of FSDP.
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    class Scaler(ShardedGradScaler):
        def _unscale_grads_(self, optimizer: Any, *args: Any) -> Any:
            its = _holders(step_of(optimizer).parts_of_gradients())
            optimizer = SimpleNamespace(param_groups=[{"params": its}])
            return super()._unscale_grads_(optimizer, *args)

    return Scaler(
        device,
        init_scale=scaler._init_scale,
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        # None is the default group at the time of use. torch's own default for this argument is the
        # default group at the time of the import.
        process_group=None,
    )


def convert(plugin: Precision, step_of: StepOf) -> Precision:
    """Return the plugin for sharded gradients that replaces Lightning's ``plugin``.

    Raises:
        ValueError: Zero3Strategy does not support the precision of ``plugin``.
    """
    if isinstance(plugin, _ShardedClipping):
        return plugin
    if type(plugin) not in _SHARDED:
        raise ValueError(
            f"Zero3Strategy does not support the precision plugin {type(plugin).__name__}"
            f" ({plugin.precision!r}). Use '32-true', 'bf16-mixed', '16-mixed', 'bf16-true',"
            " '16-true' or '64-true'."
        )
    converted: Any = copy(plugin)
    converted.__class__, converted._step_of = _SHARDED[type(plugin)], step_of
    if scaler := getattr(plugin, "scaler", None):
        converted.scaler = _sharded_scaler(scaler, converted.device, step_of)
    return converted


def gather_dtypes(
    model: nn.Module, precision: str, kept: Collection[str]
) -> dict[str, torch.dtype]:
    """Return name -> dtype for the parameters that are gathered in another dtype than their own.

    Args:
        model: the module with the parameters.
        precision: the Trainer's ``precision``.
        kept: names of parameters that are always gathered in their own dtype.
    """
    low = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    return {} if low is None else dict.fromkeys(cast_names(model).difference(kept), low)


def kept_names(model: nn.Module, patterns: Sequence[str], precision: str) -> set[str]:
    """Return the names of the parameters that the patterns of ``keep_in_fp32`` match.

    A pattern (``fnmatch``) matches the name of a parameter, or of a module that contains it.

    Raises:
        ValueError: a pattern matches nothing, or ``precision`` has given all parameters another
            dtype.
    """
    if patterns and precision not in ("32-true", "bf16-mixed", "16-mixed"):
        raise ValueError(
            f"Zero3Strategy(keep_in_fp32={list(patterns)}) with precision={precision!r}, which"
            " makes all parameters of that dtype. Use 'bf16-mixed' or '16-mixed', or leave"
            " keep_in_fp32 out."
        )
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    kept: set[str] = set()
    for pattern in patterns:
        found = {
            name
            for name in names
            if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        }
        if not found:
            raise ValueError(
                f"Zero3Strategy(keep_in_fp32=[{pattern!r}]) matches no module and no parameter of"
                " the model."
            )
        kept |= found
    return kept


def wire_dtype(name: WireDtype | None) -> torch.dtype | None:
    """Return the dtype in which fp32 travels, for the name that a user gives; None for fp32 itself.

    Raises:
        ValueError: ``name`` is neither None nor 'bf16'.
    """
    if name not in (None, "bf16"):
        raise ValueError(f"reduce_dtype of Zero3Strategy is 'bf16' or None, not {name!r}.")
    return torch.bfloat16 if name else None


def cast_names(model: nn.Module) -> set[str]:
    """Return the names of parameters that autocast reads in the lower precision alone.

    Only modules that autocast runs in the lower precision use them. Norms, embeddings, parameters
    shared with a module of another kind, and parameters from which a weight is computed
    (``weight_orig``, ``weight_g``) are left out: autocast reads their full precision.
    """
    cast: dict[int, bool] = {}
    for module in model.modules():
        for key, p in module._parameters.items():
            cast[id(p)] = (
                cast.get(id(p), True)
                and type(module) in _CAST_MODULES
                and key in ("weight", "bias")
            )
    return {
        name for name, p in model.named_parameters() if p.dtype == torch.float32 and cast[id(p)]
    }
