"""What an optimizer must see of the model to update one element of it: that element, or the
parameter that it is in. One that must see several parameters is an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from .trial import Options, train_copy

# Of torch, and right on any part of a parameter. A subclass may do anything.
ELEMENTWISE = frozenset(
    {SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, ASGD, RMSprop, Rprop}
)
_SHAPES = [(4, 8), (2, 4)]  # of the parameters of a trial: some optimizers refuse vectors
_STEPS = 34  # of a trial: rules may start late
# Factors of one gradient: a training may have such gradients, and an optimizer a rule for them.
_LARGE, _NOT_FINITE = (1e3, 1e6), (float("inf"), float("nan"))


def require_separate(optimizer: Optimizer, device: torch.device) -> None:
    """Require that ``optimizer`` updates each parameter by itself.

    Copies of it train two small tensors, together and one at a time, with the options of each
    group, on ``device`` (some optimizers work on a GPU only).

    Raises:
        ValueError: the optimizer combines parameters, or could not be tried.
    """
    # There may be no groups: where `configure_optimizers` returns None, Lightning's
    # `_init_optimizers_and_lr_schedulers` puts a `_MockOptimizer`.
    with torch.device(device):
        for options in _variants(optimizer):
            _try(optimizer, options)


def _variants(optimizer: Optimizer) -> Iterable[Options]:
    """Return the options of one group of each kind.

    Groups whose floats (a learning rate, a decay) differ in size alone are of one kind.
    """
    left_out = "params", "param_names", "initial_lr"
    kinds = {}
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k not in left_out}
        kind = {k: bool(v) if isinstance(v, float) else v for k, v in options.items() if k != "lr"}
        kinds[repr(kind)] = options
    return kinds.values()


def _try(optimizer: Optimizer, options: Options) -> None:
    try:
        is_separate = _agree(optimizer, options, _LARGE)
    except Exception as error:
        raise ValueError(
            f"{type(optimizer).__name__} could not be tried on small tensors"
            f" ({type(error).__name__}: {error}), so it cannot be trusted with shards. A copy"
            " of it steps with and without a closure.\nIf it wraps another optimizer, return that"
            " one in `configure_optimizers`, and do the rest in manual optimization"
            " (`automatic_optimization = False`). Else use one that updates each parameter by"
            " itself (SGD for sparse gradients), or another strategy."
        ) from error
    with suppress(Exception):  # the optimizer would raise in the training, too
        is_separate = is_separate and _agree(optimizer, options, _NOT_FINITE)
    if not is_separate:
        raise ValueError(
            f"{type(optimizer).__name__} combines several parameters in the update of one: by a"
            " global norm, a step that it skips when any gradient is large or not finite, random"
            " numbers, or what a closure returns. With Zero3Strategy no rank has them all.\nUse an"
            " optimizer that updates each parameter by itself, and clip by"
            " `Trainer(gradient_clip_val=...)`, or another strategy."
        )


def _agree(optimizer: Optimizer, options: Options, factors: tuple[float, float]) -> bool:
    """Say whether training tensors together and one at a time gives the same values.

    In an early step and in the last but one the gradient of the first tensor is so many times as
    large as ``factors`` say.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    values, *grads = (
        [torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(1 + _STEPS)
    )
    for step, factor in zip((1, -2), factors, strict=True):
        grads[step][0] *= factor
    together, alone = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    train_copy(optimizer, options, together, grads)
    if all(map(torch.equal, together, values)):
        raise RuntimeError("it does not step on its own param groups")
    for k, parameter in enumerate(alone):
        # Another loss than the joint copy's: in a training each rank has a loss of its own.
        train_copy(optimizer, options, [parameter], [[grad[k]] for grad in grads], loss=2.0)
    return all(map(_is_close, together, alone))


def _is_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)
