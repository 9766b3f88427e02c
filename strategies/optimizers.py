"""How an optimizer may step on flat shards, found out by trying it on a small example."""

from __future__ import annotations

import enum
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

Shapes = list[tuple[int, ...]]
Options = dict[str, Any]  # of a param group

# As large as where optimizers begin to treat a tensor otherwise (factors of large matrices, quantized blocks).
_LARGE, _SLICES = [(160, 130), (8200,)], [(13_003,), (15_997,)]
_SMALL, _CUTS = [(4, 8), (8,)], [(13,), (27,)]  # of which many steps cost little
_STEPS, _LATEST = 3, 200  # tried; and the latest that is believed to be the start of something, where an option names it
_RATE = 1e-2  # at least: a warm-up may start where nothing could be seen


class Stepping(enum.Enum):
    """What an optimizer must see of the model to update one element of it."""

    ELEMENTS = "that element: it can step on flat shards"
    TENSORS = "the parameter that it is in: it must step on whole parameters"
    MODEL = "all parameters at once, as one long vector"


def stepping(optimizer: Optimizer, device: torch.device) -> Stepping:
    """Find out what ``optimizer`` must see, by letting copies of it train a matrix and a vector.

    One copy trains them together. The optimizer is elementwise if copies that train a slice of their elements each come to the
    same, and needs whole tensors if copies that train one of the two each do (Muon, Adafactor, LAMB). It is tried with the
    options of each of its groups and those that it keeps as attributes, past the steps that these name
    (`start_preconditioning_step=25`), and needs whole tensors in any case if it looks at their dimensions: what it does to a
    matrix may depend on data that no trial has (AdamP).

    Args:
        optimizer: with its param groups.
        device: to try it on, as some work on a GPU only (``capturable=True``).

    Raises:
        ValueError: naming the optimizer and what to do: it combines parameters, or could not be tried.
    """
    if isinstance(optimizer, LBFGS):
        return Stepping.MODEL
    found = Stepping.ELEMENTS  # without groups, too: what Lightning puts where `configure_optimizers` returns None
    with torch.device(device):
        for options in _variants(optimizer):
            if _find_out(optimizer, options) is Stepping.TENSORS:
                found = Stepping.TENSORS
    return found


def _variants(optimizer: Optimizer) -> Iterator[Options]:
    """The options of one group of each kind; how large a rate or a decay is makes no kind."""
    known = set()
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
        kind = repr({k: bool(v) if isinstance(v, float) else v for k, v in options.items() if k != "lr"})
        if kind not in known:
            known.add(kind)
            yield options


def _find_out(optimizer: Optimizer, options: Options) -> Stepping:
    cls = type(optimizer)
    try:
        if _is_elementwise(optimizer, options):
            return Stepping.ELEMENTS
    except Exception:
        pass  # it may take matrices only; what else fails is tried with whole tensors, which are exact, and told if they fail
    shapes = [(4, 8), (2, 4) if _refuses_vectors(optimizer, options) else (8,)]
    try:
        apart = _agree(optimizer, options, shapes, shapes)
    except Exception as error:
        raise ValueError(
            f"{cls.__name__} could not be tried on small tensors ({type(error).__name__}: {error}), so it cannot be trusted "
            "with shards. Use an optimizer that updates each parameter by itself, or another strategy."
        ) from error
    if not apart:
        raise ValueError(
            f"{cls.__name__} combines several parameters in the update of one (a global norm, for instance; or it draws random "
            "numbers), and with Zero3Strategy no rank has them all. Use an optimizer that updates each parameter by itself, or "
            "another strategy."
        )
    return Stepping.TENSORS


def _is_elementwise(optimizer: Optimizer, options: Options) -> bool:
    named = [*options.values(), *_attributes(optimizer).values()]
    late = [value for value in named if type(value) is int and _STEPS <= value <= _LATEST]
    return (
        _agree(optimizer, options, _LARGE, _SLICES)
        and (not late or _agree(optimizer, options, _SMALL, _CUTS, max(late) + 2))
        and not _looks_at_dimensions(optimizer, options)
    )


def _agree(optimizer: Optimizer, options: Options, together: Shapes, apart: Shapes, steps: int = _STEPS) -> bool:
    """Whether elements, trained together in some shapes, come out as if trained apart, one tensor of others at a time."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    numel = sum(torch.Size(shape).numel() for shape in together)
    values, *grads = (torch.randn(numel, generator=generator) for _ in range(1 + steps))
    joint, single = _parts(values.clone(), together), _parts(values.clone(), apart)
    _train(optimizer, options, joint, [_parts(grad, together) for grad in grads])
    for k, part in enumerate(single):
        _train(optimizer, options, [part], [[_parts(grad, apart)[k]] for grad in grads])
    # Some optimizers put other tensors in the place of these (`p.data = ...`).
    first, second = (torch.cat([p.detach().flatten() for p in parts]) for parts in (joint, single))
    return not torch.equal(first, values) and torch.allclose(first, second, rtol=1e-4, atol=1e-6)


def _refuses_vectors(optimizer: Optimizer, options: Options) -> bool:
    try:
        _train(optimizer, options, [nn.Parameter(torch.ones(8))], [[torch.ones(8)]])
    except Exception:
        return True
    return False


def _parts(flat: Tensor, shapes: Shapes) -> list[nn.Parameter]:
    """Views of ``flat``, end to end."""
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [nn.Parameter(part.view(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _train(optimizer: Optimizer, options: Options, parameters: list[nn.Parameter], grads: list[list[Tensor]]) -> None:
    accepted = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    # Some optimizers add a default of their own, which their constructor does not take.
    defaults = {k: _own(v) for k, v in optimizer.defaults.items() if takes_any or k in accepted}
    copy = type(optimizer)(parameters, **defaults)
    vars(copy).update(_attributes(optimizer))
    for group in copy.param_groups:
        group.update({key: _own(value) for key, value in options.items()})
        rate = group.get("lr") or 0.0
        group["lr"] = rate.clamp_min(_RATE) if isinstance(rate, Tensor) else max(rate, _RATE)
    for step in grads:
        for p, grad in zip(parameters, step, strict=True):
            p.grad = grad.detach().clone().as_subclass(_Asked if isinstance(p, _Asked) else Tensor)
        copy.step()


def _attributes(optimizer: Optimizer) -> Options:
    """Numbers, flags and functions that an optimizer keeps on itself; not what stands for one of its methods."""
    cls, kinds = type(optimizer), int | float | str | None | FunctionType
    return {k: v for k, v in vars(optimizer).items() if isinstance(v, kinds) and not callable(getattr(cls, k, None))}


def _own(option: Any) -> Any:
    return option.detach().clone() if isinstance(option, Tensor) else option


# ---- what an optimizer asks ------------------------------------------------------------------


def _looks_at_dimensions(optimizer: Optimizer, options: Options) -> bool:
    """Whether code that is not torch's asks how many dimensions a parameter or its gradient has, or how large one is."""
    parameters, _Asked.asked = [_Asked(p.detach()) for p in _parts(torch.ones(40), _SMALL)], False
    try:
        _train(optimizer, options, parameters, [[torch.ones_like(p) for p in _parts(torch.ones(40), _SMALL)]] * _STEPS)
    except Exception:
        return True  # nobody knows what it would have asked
    return _Asked.asked


class _Asked(nn.Parameter):
    """Notes that its dimensions are asked for; so does what is computed from it element by element."""

    asked = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Compute, and note."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
            if type(result) is Tensor and args and result.shape == getattr(args[0], "shape", None):
                return result.as_subclass(cls)
        if _by_torch(sys._getframe(1)):
            return result
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if name in ("dim", "ndim", "ndimension", "__len__") or (name == "size" and isinstance(result, int)):
            cls.asked = True
        return _Sizes(result) if isinstance(result, torch.Size) else result


class _Sizes(tuple):
    """A shape that notes that it is looked into; handed on as a whole (`torch.zeros(p.shape)`) it says nothing."""

    def __len__(self) -> int:
        """How many dimensions."""
        _Asked.asked = True
        return super().__len__()

    def __iter__(self) -> Iterator[int]:
        """All dimensions."""
        _Asked.asked = True
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        """One dimension, or some."""
        _Asked.asked = True
        return super().__getitem__(index)


def _by_torch(frame: Any) -> bool:
    """Whether torch's own code asks, which stands between any other and the default device."""
    while (module := frame.f_globals.get("__name__", "")) == "torch.utils._device":
        frame = frame.f_back
    return module.partition(".")[0] == "torch"
