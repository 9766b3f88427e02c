"""A copy of an optimizer trains small tensors, to see what it does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode

Options = dict[str, Any]  # of a param group

_RATE = 1e-2  # at least: a warm-up may start where nothing could be seen


def train(
    optimizer: Optimizer,
    options: Options,
    parameters: list[nn.Parameter],
    grads: list[list[Tensor]],
    loss: float = 1.0,
) -> Optimizer:
    """Let a copy of ``optimizer`` train ``parameters`` as its one group; it takes every other step
    with a closure, if it can.

    Args:
        optimizer: is not changed.
        options: of the group.
        parameters: are changed.
        grads: of each step, for each parameter; a tenth of the parameter is added.
        loss: that the closure returns.

    Returns:
        The copy, with its state.
    """
    copy = _copy(optimizer, options, parameters)
    with_closure = _takes_closure(copy)
    with _without_global_hooks():
        for number, step in enumerate(grads):
            evaluate = partial(_evaluate, parameters, step, loss)
            evaluate()
            copy.step(closure=evaluate) if with_closure(number) else copy.step()
    return copy


def attributes(optimizer: Optimizer, copy: Optimizer | None = None) -> Options:
    """What ``optimizer`` keeps on itself beside what every optimizer has and what stands for a
    method; nothing with tensors.

    Args:
        optimizer: whose attributes are copied.
        copy: methods of ``optimizer`` among them become methods of this.
    """
    common, cls = vars(SGD([torch.zeros(1)])), type(optimizer)
    found = {}
    for name, value in vars(optimizer).items():
        if name not in common and not callable(getattr(cls, name, None)):
            try:
                with _WithoutTensors():
                    found[name] = deepcopy(value, {id(optimizer): copy or optimizer})
            except Exception:
                # it cannot be copied, or has tensors: the copy has what its constructor made
                continue
    return found


def _copy(optimizer: Optimizer, options: Options, parameters: list[nn.Parameter]) -> Optimizer:
    cls, kept = type(optimizer), attributes(optimizer)
    accepted = inspect.signature(cls.__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    # Some optimizers add a default of their own, which their constructor does not take; some take
    # what is no default.
    arguments = {k: _own(v) for k, v in optimizer.defaults.items() if takes_any or k in accepted}
    required = {
        k
        for k, p in accepted.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    arguments |= {k: kept[k] for k in required & kept.keys() - arguments.keys()}
    own = {key: value if key == "param_names" else _own(value) for key, value in options.items()}
    group = {key: value for key, value in own.items() if key != "param_names"}
    try:
        copy = cls([{**group, "params": parameters}], **arguments)
    except Exception:
        copy = cls(parameters, **arguments)  # it may take no groups
    vars(copy).update(attributes(optimizer, copy))
    for group in copy.param_groups:
        group.update(own)
        rate = group.get("lr") or 0.0
        group["lr"] = rate.clamp_min(_RATE) if isinstance(rate, Tensor) else max(rate, _RATE)
    if callable(start := getattr(copy, "train", None)):  # schedule-free ones refuse to step before
        start()
    return copy


def _own(option: Any) -> Any:
    if isinstance(option, Tensor):
        return option.detach().clone()
    try:
        return deepcopy(option)
    except Exception:
        return option


def _takes_closure(optimizer: Optimizer) -> Callable[[int], bool]:
    """For the number of a step, whether it is taken with a closure, as Lightning takes all but
    those of manual optimization.
    """
    accepted = inspect.signature(optimizer.step).parameters
    closure = accepted.get("closure")
    if closure is None:
        return lambda number: False
    return lambda number: closure.default is closure.empty or number % 2 == 0


def _evaluate(parameters: list[nn.Parameter], grads: list[Tensor], loss: float) -> Tensor:
    """A closure. Gradients follow the weights, as those who move them and evaluate again expect
    (sharpness-aware ones).
    """
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = grad.detach() + 0.1 * p.detach()
    return torch.tensor(loss)


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """A user's hooks on all optimizers are for steps of the training."""
    hooks = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    before = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, kept in zip(hooks, before, strict=True):
            each.update(kept)


class _WithoutTensors(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise TypeError("this is for what holds no tensor")
