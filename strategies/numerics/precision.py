"""Lightning precision plugins for sharded gradients: clipping is over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from typing_extensions import override

from ..engine import is_sharded

# What autocast runs in the lower precision anyway (torch.amp's op reference): gathering these
# weights in it changes no number.
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
SumOverRanks = Callable[[Tensor], Tensor]


class _ShardedClipping(Precision):
    """Clips by the norm of the whole gradient, of which each rank holds a part.

    Args:
        sum_over_ranks: adds a tensor over all ranks.
        adopt_gradients: called after the hooks in which users change gradients.
        unguard: called with an optimizer whose closure is over, and with it the hooks that look at
            gradients.
    """

    def __init__(
        self,
        *args: object,
        sum_over_ranks: SumOverRanks,
        adopt_gradients: Callable[[], None],
        unguard: Callable[[Optimizer], None],
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sum_over_ranks, self._adopt_gradients, self._unguard = (
            sum_over_ranks,
            adopt_gradients,
            unguard,
        )

    @override
    def clip_gradients(
        self, optimizer: Optimizer, clip_val: int | float = 0.0, *args: Any, **kwargs: Any
    ) -> None:
        if clip_val <= 0:
            return  # Lightning asks in every step
        self._adopt_gradients()
        self._clip(optimizer, clip_val, *args, **kwargs)
        self._adopt_gradients()  # who holds gradients sees them clipped

    def _clip(self, *args: Any, **kwargs: Any) -> None:
        super().clip_gradients(*args, **kwargs)

    @override
    def _after_closure(self, *args: Any, **kwargs: Any) -> None:
        super()._after_closure(*args, **kwargs)
        self._adopt_gradients()

    @override
    def _wrap_closure(self, model: Any, optimizer: Any, closure: Callable[[], Any]) -> Any:
        result = super()._wrap_closure(model, optimizer, closure)
        self._unguard(optimizer)
        return result

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale gradients so that their global 2-norm is at most ``clip_val``, as
        ``torch.nn.utils.clip_grad_norm_``.
        """
        grads = [
            p.grad.as_subclass(Tensor)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norm = global_norm(grads, self._sum_over_ranks)
        factor = torch.clamp(clip_val / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.device, grad.dtype))


class Zero3Precision(_ShardedClipping, Precision):
    """``32-true``."""


class Zero3MixedPrecision(_ShardedClipping, MixedPrecision):
    """``bf16-mixed`` and ``16-mixed``: autocast over weights gathered in the lower precision, fp32
    shards.

    With ``16-mixed`` all ranks agree on whether a step has finite gradients, and a step that is
    skipped because it has not skips the learning-rate schedulers that are stepped with it, until
    one is not skipped.
    """

    _schedulers: list[LRSchedulerConfig]

    @override
    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        self._schedulers = [config for config in lr_schedulers if config.interval == "step"]
        self._frequencies = [config.frequency for config in self._schedulers]
        self._overdue = [False] * len(self._schedulers)  # it was due after a step that was skipped
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)

        def complete() -> Any:
            result = closure()
            self._adopt_gradients()  # before they are unscaled
            skipped = result is None and model.automatic_optimization
            if _optimizer_handles_unscaling(optimizer) and not skipped:
                _unscale_for(optimizer, self.scaler)
            return result

        if not self._schedulers:
            # to ask for the scale is to wait for the device
            return super().optimizer_step(optimizer, model, complete, **kwargs)
        before = self.scaler.get_scale()
        result = super().optimizer_step(optimizer, model, complete, **kwargs)
        skipped = self.scaler.get_scale() < before
        batches = model.trainer.fit_loop.epoch_loop.batch_idx + 1
        for number, (config, frequency) in enumerate(
            zip(self._schedulers, self._frequencies, strict=True)
        ):
            # The loop steps a scheduler every so many batches; after a step that is not skipped at
            # the latest.
            config.frequency = sys.maxsize if skipped else 1 if self._overdue[number] else frequency
            self._overdue[number] = skipped and (self._overdue[number] or batches % frequency == 0)
        return result

    @override
    def _after_closure(self, *args: Any, **kwargs: Any) -> None:
        if self.scaler is not None:
            self._adopt_gradients()  # who holds gradients sees them unscaled
        super()._after_closure(*args, **kwargs)

    @override
    def _clip(self, *args: Any, **kwargs: Any) -> None:
        if self.scaler is not None:
            super()._clip(*args, **kwargs)
        else:  # fused optimizers may: there is nothing for them to unscale
            Precision.clip_gradients(self, *args, **kwargs)


class Zero3HalfPrecision(_ShardedClipping, HalfPrecision):
    """``bf16-true`` and ``16-true``: shards in the lower precision, gradients summed over ranks in
    fp32.
    """

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return (
            module
            if _is_converted(module, self._desired_input_dtype)
            else super().convert_module(module)
        )


class Zero3DoublePrecision(_ShardedClipping, DoublePrecision):
    """``64-true``."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module if _is_converted(module, torch.float64) else super().convert_module(module)


def _is_converted(module: nn.Module, dtype: torch.dtype) -> bool:
    # A module that an earlier run sharded is converted, and cannot be touched. Of others the
    # buffers may differ.
    parameters = list(module.parameters())
    return any(map(is_sharded, parameters)) and all(
        p.dtype == dtype for p in parameters if p.dtype.is_floating_point
    )


def _sharded_scaler(
    scaler: torch.amp.GradScaler | None, device: str
) -> torch.amp.GradScaler | None:
    """A scaler with the same settings whose check for infinities all ranks share."""
    if scaler is None:
        return None
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler  # imports all of FSDP

    return ShardedGradScaler(
        device,
        init_scale=scaler._init_scale,
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        # the default one when it is used; torch's own default is that of when it was imported
        process_group=None,
    )


def _unscale_for(optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
    """Unscale here what a fused ``optimizer`` would unscale itself, without hearing of infinities
    on other ranks.
    """
    # the user may have done so
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.UNSCALED:
        scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    # fused kernels skip at exactly 1
    found.update({device: ranks.clamp(max=1).reshape(()) for device, ranks in found.items()})


def global_norm(grads: list[Tensor], sum_over_ranks: SumOverRanks) -> Tensor:
    """2-norm [] of the concatenation of all ranks' ``grads``, in float64.

    One fp32 sum over a flat tensor would lose digits. On the CPU, where a sum in float64 makes a
    copy, norms of runs of 64 Ki elements are combined in float64.
    """
    if grads and grads[0].device.type != "cpu":
        grads = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in grads]
        norms = torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads])
        return sum_over_ranks(norms.square().sum()).sqrt()
    runs = [run for grad in grads for run in grad.split(1 << 16)]
    norms = (
        torch.stack(torch._foreach_norm(runs)).double()
        if runs
        else torch.zeros(1, dtype=torch.float64)
    )
    return sum_over_ranks(norms.square().sum()).sqrt()


def convert(
    plugin: Precision,
    sum_over_ranks: SumOverRanks,
    adopt_gradients: Callable[[], None],
    unguard: Callable[[Optimizer], None],
) -> Precision:
    """The plugin for sharded gradients that stands for Lightning's ``plugin``.

    Raises:
        ValueError: a precision that is not supported.
    """
    if isinstance(plugin, _ShardedClipping):
        return plugin
    shared: dict[str, Any] = {
        "sum_over_ranks": sum_over_ranks,
        "adopt_gradients": adopt_gradients,
        "unguard": unguard,
    }
    if type(plugin) is Precision:
        return Zero3Precision(**shared)
    if type(plugin) is MixedPrecision:
        return Zero3MixedPrecision(
            plugin.precision, plugin.device, _sharded_scaler(plugin.scaler, plugin.device), **shared
        )
    if type(plugin) is HalfPrecision:
        return Zero3HalfPrecision(plugin.precision, **shared)
    if type(plugin) is DoublePrecision:
        return Zero3DoublePrecision(**shared)
    raise ValueError(
        f"Zero3Strategy does not support the precision plugin {type(plugin).__name__}"
        f" ({plugin.precision!r}). Use '32-true', 'bf16-mixed', '16-mixed', 'bf16-true', '16-true'"
        " or '64-true'."
    )


def gather_dtypes(
    model: nn.Module, precision: str, kept: Collection[str]
) -> dict[str, torch.dtype]:
    """Name -> dtype in which a parameter is gathered, where that is not its own.

    Args:
        model: the module whose parameters are meant.
        precision: the Trainer's.
        kept: names of parameters that are always gathered in their own dtype.
    """
    low = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    return {} if low is None else dict.fromkeys(cast_names(model).difference(kept), low)


def kept_names(model: nn.Module, patterns: Sequence[str], precision: str) -> set[str]:
    """Names of the parameters that ``keep_in_fp32`` means: their own or their modules' match a
    pattern (``fnmatch``).

    Raises:
        ValueError: a pattern matches nothing, or the precision has made all parameters something
            else.
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
    """The dtype that fp32 travels in, from the name that a user gives it.

    Raises:
        ValueError: another name.
    """
    if name not in (None, "bf16"):
        raise ValueError(
            f"gather_dtype and reduce_dtype of Zero3Strategy are 'bf16' or None, not {name!r}."
        )
    return torch.bfloat16 if name else None


def cast_names(model: nn.Module) -> set[str]:
    """Names of parameters that only modules use which autocast runs in the lower precision.

    Norms, embeddings and parameters that a module of another kind shares are not among them, nor
    what a weight is computed from (``weight_orig``, ``weight_g``): autocast computes with their
    full precision, and so do we.
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
