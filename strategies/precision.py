"""Lightning precision plugins for sharded gradients: clipping is over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

# What autocast runs in the lower precision anyway (torch.amp's op reference): gathering these weights in it changes no number.
_CAST_MODULES = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.modules.linear.NonDynamicallyQuantizableLinear,
)

SumOverRanks = Callable[[Tensor], Tensor]


class _ShardedClipping(Precision):
    """Clips by the norm of the whole gradient, of which each rank holds a part.

    Args:
        sum_over_ranks: adds a tensor over all ranks.
        adopt_gradients: called after the hooks in which users change gradients.
    """

    def __init__(
        self, *args: object, sum_over_ranks: SumOverRanks, adopt_gradients: Callable[[], None], **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sum_over_ranks, self._adopt_gradients = sum_over_ranks, adopt_gradients

    @override
    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        self._adopt_gradients()
        super().clip_gradients(*args, **kwargs)

    @override
    def _after_closure(self, *args: Any, **kwargs: Any) -> None:
        super()._after_closure(*args, **kwargs)
        self._adopt_gradients()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale gradients so that their global 2-norm is at most ``clip_val``, as ``torch.nn.utils.clip_grad_norm_``."""
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = global_norm(grads, self._sum_over_ranks)
        factor = torch.clamp(clip_val / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(factor.to(grad.device, grad.dtype))


class Zero3Precision(_ShardedClipping, Precision):
    """``32-true``."""


class Zero3MixedPrecision(_ShardedClipping, MixedPrecision):
    """``bf16-mixed``: autocast over weights gathered in bfloat16, fp32 shards."""

    @override
    def clip_gradients(self, optimizer: Optimizer, clip_val: int | float = 0.0, gradient_clip_algorithm: str = "norm") -> None:
        """As the base, but fused optimizers may clip: without a scaler there is nothing for them to unscale."""
        self._adopt_gradients()
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


def global_norm(grads: list[Tensor], sum_over_ranks: SumOverRanks) -> Tensor:
    """2-norm [] of the concatenation of all ranks' ``grads``, in float64.

    Norms of runs of 64 Ki elements are combined in float64: one fp32 sum over a flat tensor would lose digits.
    """
    runs = [run for grad in grads for run in grad.split(1 << 16)]
    norms = torch.stack(torch._foreach_norm(runs)).double() if runs else torch.zeros(1, dtype=torch.float64)
    return sum_over_ranks(norms.square().sum()).sqrt()


def convert(plugin: Precision, sum_over_ranks: SumOverRanks, adopt_gradients: Callable[[], None]) -> Precision:
    """The plugin for sharded gradients that stands for Lightning's ``plugin``.

    Raises:
        ValueError: a precision that is not supported.
    """
    if isinstance(plugin, _ShardedClipping):
        return plugin
    if type(plugin) is Precision:
        return Zero3Precision(sum_over_ranks=sum_over_ranks, adopt_gradients=adopt_gradients)
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return Zero3MixedPrecision(
            plugin.precision, plugin.device, sum_over_ranks=sum_over_ranks, adopt_gradients=adopt_gradients
        )
    raise ValueError(
        f"Zero3Strategy does not support precision {plugin.precision!r} ({type(plugin).__name__}) yet. Use '32-true' or "
        "'bf16-mixed'."
    )


def cast_names(model: nn.Module) -> set[str]:
    """Names of parameters that only modules use which autocast runs in the lower precision.

    Norms, embeddings and parameters that a module of another kind shares are not among them: autocast computes with their
    full precision, and so do we.
    """
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for p in module._parameters.values():
            if p is not None:
                users.setdefault(id(p), []).append(module)
    return {
        name
        for name, p in model.named_parameters()
        if p.dtype == torch.float32 and all(type(m) in _CAST_MODULES for m in users[id(p)])
    }
