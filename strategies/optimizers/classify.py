"""What an optimizer must see of the model to update one element of it."""

from __future__ import annotations

import enum
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
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
_ELEMENTWISE = frozenset(
    {SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad, ASGD, RMSprop, Rprop}
)
_SHAPES = [(4, 8), (2, 4)]  # of the parameters of a trial: some optimizers refuse vectors
_STEPS = 32  # of a trial: rules may start late
_LAST_START = 200  # integer options up to this may be the last step before a rule starts
# Factors of one gradient: a training may have such gradients, and an optimizer a rule for them.
_FACTORS = (1e3, 1e6, float("inf"), float("nan"))


class Stepping(enum.Enum):
    """What an optimizer must see of the model to update one element of it."""

    ELEMENTS = "that element: it can step on shards"
    TENSORS = "the parameter that it is in: it must step on whole parameters"
    MODEL = "all parameters at once, as one long vector: it must step on the module's own"


def find_stepping(optimizer: Optimizer, device: torch.device) -> Stepping:
    """What ``optimizer`` must see: elements if it is one of torch's own that update each by itself,
    whole parameters otherwise.

    What is not torch's is tried: copies of it train two small tensors, together and one at a time,
    with the options of each group, on ``device`` (some optimizers work on a GPU only).

    Raises:
        ValueError: the optimizer combines parameters, or could not be tried.
    """
    if isinstance(optimizer, LBFGS):
        return Stepping.MODEL
    if type(optimizer) in _ELEMENTWISE:
        return Stepping.ELEMENTS
    # There may be no groups: where `configure_optimizers` returns None, Lightning's
    # `_init_optimizers_and_lr_schedulers` puts a `_MockOptimizer`.
    with torch.device(device):
        for options in _variants(optimizer):
            _require_separate(optimizer, options)
    return Stepping.TENSORS


def _variants(optimizer: Optimizer) -> Iterator[Options]:
    """Yield the options of one group of each kind.

    Groups whose floats (a learning rate, a decay) differ in size alone are of one kind.
    """
    known = set()
    for group in optimizer.param_groups:
        options = _options(group)
        kind = repr(
            {
                k: bool(v) if isinstance(v, float) else v
                for k, v in options.items()
                if k not in ("lr", "param_names")
            }
        )
        if kind not in known:
            known.add(kind)
            yield options


def _options(group: Options) -> Options:
    return {key: value for key, value in group.items() if key not in ("params", "initial_lr")}


def _require_separate(optimizer: Optimizer, options: Options) -> None:
    named = *options.values(), *vars(optimizer).values()
    starts = [value for value in named if type(value) is int and value <= _LAST_START]
    steps = max([_STEPS, *starts]) + 2
    try:
        separate = _agree(optimizer, options, steps)
    except Exception as error:
        raise ValueError(
            f"{type(optimizer).__name__} could not be tried on small tensors"
            f" ({type(error).__name__}: {error}), so it cannot be trusted with shards. A copy"
            " of it steps with and without a closure.\nIf it wraps another optimizer, return that"
            " one in `configure_optimizers`, and do the rest in manual optimization"
            " (`automatic_optimization = False`). Else use one that updates each parameter by"
            " itself (SGD for sparse gradients), or another strategy."
        ) from error
    if not separate or any(_combines(factor, optimizer, options, steps) for factor in _FACTORS):
        raise ValueError(
            f"{type(optimizer).__name__} combines several parameters in the update of one: by a"
            " global norm, a step that it skips when any gradient is large or not finite, random"
            " numbers, or what a closure returns. With Zero3Strategy no rank has them all.\nUse an"
            " optimizer that updates each parameter by itself, and clip by"
            " `Trainer(gradient_clip_val=...)`, or another strategy."
        )


def _combines(factor: float, optimizer: Optimizer, options: Options, steps: int) -> bool:
    """Say whether one gradient of one tensor, ``factor`` times as large, changes other tensors."""
    try:
        return not _agree(optimizer, options, steps, factor)
    except Exception:
        return False  # the optimizer would raise in the training, too


def _agree(optimizer: Optimizer, options: Options, steps: int, factor: float = 1.0) -> bool:
    """Say whether training tensors together and one at a time gives the same values.

    In an early step and in the last but one the gradient of the first tensor is ``factor`` times as
    large.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    values, *grads = (
        [torch.randn(shape, generator=generator) for shape in _SHAPES] for _ in range(1 + steps)
    )
    for step in (1, steps - 2):
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
