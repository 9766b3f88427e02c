"""Let a copy of an optimizer train small tensors, to see what it does to them."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Options = dict[str, Any]  # options of a param group

_LEAST_RATE = 1e-2  # a warm-up may start with a rate whose updates nobody could see


def train_copy(
    optimizer: Optimizer,
    options: Options,
    parameters: Sequence[nn.Parameter],
    grads: Sequence[Sequence[Tensor]],
    loss: float = 1.0,
) -> Optimizer:
    """Let a copy of ``optimizer`` train ``parameters``, which are its one param group.

    The copy takes every other step with a closure, if it accepts one, and all if it requires one.

    Args:
        optimizer: stays as it is.
        options: options of the param group.
        parameters: the copy steps on them.
        grads: gradients of each step, one for each parameter; in each step a tenth of the
            parameter is added.
        loss: value that the closure returns.

    Returns:
        The copy, with its state.
    """
    copy = _copy_optimizer(optimizer, options, parameters)
    closure = inspect.signature(copy.step).parameters.get("closure")
    for number, step in enumerate(grads):
        evaluate = partial(_evaluate_closure, parameters, step, loss)
        evaluate()
        # Lightning passes one to every step but those of manual optimization.
        if closure is None or (closure.default is not closure.empty and number % 2):
            copy.step()
        else:
            copy.step(closure=evaluate)
    return copy


def _copy_optimizer(
    optimizer: Optimizer, options: Options, parameters: Sequence[nn.Parameter]
) -> Optimizer:
    """Copy ``optimizer`` without its constructor, whose arguments nobody knows, with other
    parameters and state for them.
    """
    cls = type(optimizer)
    copy, group = cls.__new__(cls), _copy(options, {})
    group["lr"] = max(group.get("lr") or 0.0, _LEAST_RATE)
    memo: dict[int, Any] = {
        id(p): torch.empty(0) for g in optimizer.param_groups for p in g["params"]
    }
    # after another run it is no dict
    state = optimizer.state if isinstance(optimizer.state, dict) else {}
    shared = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
    memo[id(optimizer)], memo[id(optimizer.state)] = copy, defaultdict(dict, _copy(shared, {}))
    memo[id(optimizer.param_groups)] = []
    for name, value in vars(optimizer).items():
        # a scheduler of torch replaces `step`
        if not callable(getattr(cls, name, None)):
            vars(copy)[name] = OrderedDict() if name.endswith("_hooks") else _copy(value, memo)
    copy.add_param_group({**group, "params": [*parameters]})
    made: Options = next((v for key, v in state.items() if isinstance(key, Tensor)), {})
    for p in parameters if made else ():  # what the constructor has made of each parameter
        copy.state[p] = {
            key: torch.ones_like(p, dtype=value.dtype)
            if isinstance(value, Tensor) and value.dim()
            else _copy(value, {})
            for key, value in made.items()
        }
    if callable(start := getattr(copy, "train", None)):
        start()  # schedule-free optimizers refuse to step before
    return copy


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return deepcopy(value, memo)
    except Exception:
        return value


def _evaluate_closure(
    parameters: Sequence[nn.Parameter], grads: Sequence[Tensor], loss: float
) -> Any:
    """Set the gradients and return the loss [], as a closure does.

    Gradients depend on the weights, as optimizers expect that move the weights and evaluate the
    closure again (sharpness-aware ones).
    """
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad.detach() + 0.1 * p.detach()
    return torch.tensor(loss)
