"""Let a copy of an optimizer train small tensors, to see what it does to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode

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
    with_closure = _choose_steps_with_closure(copy)
    with _without_global_hooks():
        for number, step in enumerate(grads):
            evaluate = partial(_evaluate_closure, parameters, step, loss)
            evaluate()
            copy.step(closure=evaluate) if with_closure(number) else copy.step()
    return copy


def own_attributes(optimizer: Optimizer, copy: Optimizer | None = None) -> Options:
    """Return copies of the attributes that ``optimizer`` has beyond those of every optimizer.

    Attributes that replace a method, hold tensors or cannot be copied are left out.

    Args:
        optimizer: the optimizer with the attributes.
        copy: bound methods of ``optimizer`` among the attributes become methods of ``copy``.
    """
    common, cls = vars(SGD([torch.zeros(1)])), type(optimizer)
    found = {}
    for name, value in vars(optimizer).items():
        if name not in common and not callable(getattr(cls, name, None)):
            try:
                with _WithoutTensors():
                    found[name] = deepcopy(value, {id(optimizer): copy or optimizer})
            except Exception:
                continue  # the copy keeps the value that its own constructor made
    return found


def _copy_optimizer(
    optimizer: Optimizer, options: Options, parameters: Sequence[nn.Parameter]
) -> Optimizer:
    cls, kept = type(optimizer), own_attributes(optimizer)
    accepted = inspect.signature(cls.__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    # Some constructors do not take every default (the optimizer adds one of its own), and some
    # require an argument that is no default.
    arguments = {
        k: _copy_option(v) for k, v in optimizer.defaults.items() if takes_any or k in accepted
    }
    required = {
        k
        for k, p in accepted.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    arguments |= {k: kept[k] for k in required & kept.keys() - arguments.keys()}
    own = {
        key: value if key == "param_names" else _copy_option(value)
        for key, value in options.items()
    }
    group = {key: value for key, value in own.items() if key != "param_names"}
    try:
        copy = cls([{**group, "params": parameters}], **arguments)
    except Exception:
        copy = cls(parameters, **arguments)  # the constructor may refuse groups
    vars(copy).update(own_attributes(optimizer, copy))
    for group in copy.param_groups:
        group.update(own)
        rate = group.get("lr") or 0.0
        group["lr"] = (
            rate.clamp_min(_LEAST_RATE) if isinstance(rate, Tensor) else max(rate, _LEAST_RATE)
        )
    if callable(start := getattr(copy, "train", None)):
        start()  # schedule-free optimizers refuse to step before
    return copy


def _copy_option(option: Any) -> Any:
    if isinstance(option, Tensor):
        return option.detach().clone()
    try:
        return deepcopy(option)
    except Exception:
        return option


def _choose_steps_with_closure(optimizer: Optimizer) -> Callable[[int], bool]:
    """Return a function that says for the number of a step whether to pass a closure.

    Lightning passes a closure to every step but those of manual optimization, so the copy must be
    tried both ways.
    """
    accepted = inspect.signature(optimizer.step).parameters
    closure = accepted.get("closure")
    if closure is None:
        return lambda number: False
    return lambda number: closure.default is closure.empty or number % 2 == 0


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


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Take away the hooks on all optimizers: a user's are for steps of the training alone."""
    hooks: Any = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    before = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, kept in zip(hooks, before, strict=True):
            each.update(kept)


class _WithoutTensors(TorchFunctionMode):
    """Let every function of torch raise, so that copying an object with tensors fails."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        raise TypeError("only objects without tensors are copied")
