"""How an optimizer may step on flat shards, found out by trying it on a small example."""

from __future__ import annotations

import enum
import inspect

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

# As large as where optimizers begin to treat a tensor otherwise (factors of large matrices, quantized blocks).
_LARGE, _SLICES = [(160, 130), (8200,)], [(13_003,), (15_997,)]


class Stepping(enum.Enum):
    """What an optimizer must see of the model to update one element of it."""

    ELEMENTS = "that element: it can step on flat shards"
    TENSORS = "the parameter that it is in: it must step on whole parameters"
    MODEL = "all parameters at once, as one long vector"


def stepping(optimizer: Optimizer, device: torch.device) -> Stepping:
    """Find out what ``optimizer`` must see, by letting copies of it train a matrix and a vector.

    One copy trains them together. The optimizer is elementwise if copies that train a slice of their elements each come to the
    same, and needs whole tensors if copies that train one of the two each do (Muon, Adafactor, LAMB).

    Args:
        optimizer: with its param groups.
        device: to try it on, as some work on a GPU only (``capturable=True``).

    Raises:
        ValueError: naming the optimizer and what to do: it combines parameters, or could not be tried.
    """
    if isinstance(optimizer, LBFGS):
        return Stepping.MODEL
    with torch.device(device):
        return _find_out(optimizer)


def _find_out(optimizer: Optimizer) -> Stepping:
    cls = type(optimizer)
    try:
        if not optimizer.param_groups or _agree(optimizer, _LARGE, _SLICES):
            return Stepping.ELEMENTS  # without groups: what Lightning puts where `configure_optimizers` returns None
    except Exception:
        pass  # it may take matrices only
    shapes = [(4, 8), (2, 4) if _refuses_vectors(optimizer) else (8,)]
    try:
        apart = _agree(optimizer, shapes, shapes)
    except Exception as error:
        raise ValueError(
            f"{cls.__name__} could not be tried on small tensors ({type(error).__name__}: {error}), so it cannot be trusted "
            "with shards. Use an optimizer that updates each parameter by itself, or another strategy."
        ) from error
    if not apart:
        raise ValueError(
            f"{cls.__name__} combines several parameters in the update of one (a global norm, for instance), and with "
            "Zero3Strategy no rank has them all. Use an optimizer that updates each parameter by itself, or another strategy."
        )
    return Stepping.TENSORS


def _agree(optimizer: Optimizer, together: list[tuple[int, ...]], apart: list[tuple[int, ...]]) -> bool:
    """Whether elements, trained together in some shapes, come out as if trained apart, one tensor of others at a time."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    numel = sum(torch.Size(shape).numel() for shape in together)
    values, *grads = (torch.randn(numel, generator=generator) for _ in range(4))
    first, second = values.clone(), values.clone()
    _train(optimizer, _parts(first, together), [_parts(grad, together) for grad in grads])
    for k, part in enumerate(_parts(second, apart)):
        _train(optimizer, [part], [[_parts(grad, apart)[k]] for grad in grads])
    return not torch.equal(first, values) and torch.allclose(first, second, rtol=1e-4, atol=1e-6)


def _refuses_vectors(optimizer: Optimizer) -> bool:
    try:
        _train(optimizer, [nn.Parameter(torch.ones(8))], [[torch.ones(8)]])
    except Exception:
        return True
    return False


def _parts(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Views of ``flat``, end to end."""
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [nn.Parameter(part.view(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _train(optimizer: Optimizer, parameters: list[nn.Parameter], grads: list[list[Tensor]]) -> None:
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    # Some optimizers add a default of their own, which their constructor does not take.
    options = {k: v for k, v in optimizer.defaults.items() if takes_any or k in accepted}
    if isinstance(options.get("lr"), torch.Tensor):
        options["lr"] = options["lr"].detach().clone()
    copy = type(optimizer)(parameters, **options)
    for group in copy.param_groups:
        if not group.get("lr"):
            group["lr"] = 1e-2  # a warm-up may start at zero, where nothing could be seen
    for step in grads:
        for p, grad in zip(parameters, step, strict=True):
            p.grad = grad.detach().clone()
        copy.step()
