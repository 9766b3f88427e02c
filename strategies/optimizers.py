"""Which optimizers may step on flat shards: those whose update of an element depends on that element alone."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.optim import Optimizer

# Known not to be elementwise; all but Adafactor could not even be tried as below.
_KNOWN = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, torch.optim.SparseAdam)


def require_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would be wrong on a flat shard, by trying it.

    A copy of the optimizer trains a small matrix and a vector, and another trains the same numbers as two flat slices.
    Optimizers that use shapes, norms per tensor or several elements at once (Muon, Adafactor, LBFGS, LAMB) differ.

    Raises:
        ValueError: naming the optimizer and what to do.
    """
    if not optimizer.param_groups:
        return  # what Lightning puts where `configure_optimizers` returns None
    cls = type(optimizer)
    try:
        agree = not isinstance(optimizer, _KNOWN) and _whole_and_sliced_agree(optimizer)
    except Exception as error:
        raise ValueError(
            f"{cls.__name__} could not be tried on flat shards ({type(error).__name__}: {error}), so it cannot be trusted "
            "with them. Use an optimizer whose update is elementwise, like those of the Adam family, SGD or RMSprop."
        ) from error
    if not agree:
        raise ValueError(
            f"{cls.__name__} does not update each element by itself (it uses the shapes or norms of whole parameters), and "
            "Zero3Strategy gives it slices of them. Use an elementwise optimizer (the Adam family, SGD, RMSprop, Adagrad, "
            "...), or another strategy."
        )


def _whole_and_sliced_agree(optimizer: Optimizer) -> bool:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40, generator=generator)
    grads = [torch.randn(40, generator=generator) for _ in range(3)]
    whole, sliced = values.clone(), values.clone()
    _train(optimizer, [nn.Parameter(whole[:32].view(4, 8)), nn.Parameter(whole[32:])], grads)
    _train(optimizer, [nn.Parameter(sliced[:13]), nn.Parameter(sliced[13:])], grads)
    return not torch.equal(whole, values) and torch.allclose(whole, sliced, rtol=1e-4, atol=1e-6)


def _train(optimizer: Optimizer, parameters: list[nn.Parameter], grads: list[torch.Tensor]) -> None:
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    # Some optimizers add a default of their own, which their constructor does not take.
    options = {k: v for k, v in optimizer.defaults.items() if takes_any or k in accepted}
    if isinstance(options.get("lr"), torch.Tensor):
        options["lr"] = options["lr"].detach().cpu().clone()
    copy = type(optimizer)(parameters, **options)
    for group in copy.param_groups:
        if not group.get("lr"):
            group["lr"] = 1e-2  # a warm-up may start at zero, where nothing could be seen
    for grad in grads:
        start = 0
        for p in parameters:
            p.grad = grad[start : start + p.numel()].view_as(p).clone()
            start += p.numel()
        copy.step()
