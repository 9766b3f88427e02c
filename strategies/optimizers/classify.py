"""How an optimizer may step on flat shards, found out by trying it on a small example."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .probe_tensor import Asked
from .trial import Options, attributes, train

Shapes = list[tuple[int, ...]]

# As large as where optimizers begin to treat a tensor otherwise (factors of large matrices,
# quantized blocks).
_LARGE, _SLICES = [(160, 130), (8200,)], [(13_003,), (15_997,)]
_SMALL, _CUTS = [(4, 8), (8,)], [(13,), (27,)]  # of which many steps cost little
_STEPS, _LATEST = 3, 200  # tried; and the latest that is believed to be the start of something
_SOME = 30  # after which rules may begin that no option tells
# gradients that a training may have, and rules may be for
_MOMENTS = (
    1.0,
    1e3,
    1e6,
    float("inf"),
    float("nan"),
)
_ASKING = 20  # steps, in which questions are listened to


class Stepping(enum.Enum):
    """What an optimizer must see of the model to update one element of it."""

    ELEMENTS = "that element: it can step on flat shards"
    TENSORS = "the parameter that it is in: it must step on whole parameters"
    MODEL = "all parameters at once, as one long vector"


class Tried:
    """What an optimizer must see, as found out with the options of its groups.

    Args:
        optimizer: with its param groups.
        device: to try it on, as some work on a GPU only (``capturable=True``).

    Raises:
        ValueError: as :func:`stepping`.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self.stepping = stepping(optimizer, device)
        # of each group, when last looked at
        self._switches = [_switches(group) for group in optimizer.param_groups]
        self._known = list(self._switches)

    def follow(self) -> None:
        """Try options that groups have now and none had before: a rule that is on from an epoch on,
        an added group's own.

        Raises:
            ValueError: naming the options, with which the optimizer needs more than it has, or as
                :func:`stepping`.
        """
        now = [_switches(group) for group in self.optimizer.param_groups]
        if now == self._switches:
            return
        for number, switches in enumerate(now):
            if switches not in self._known:
                self._try(number, switches)
                self._known.append(switches)
        self._switches = now

    def _try(self, number: int, switches: Options) -> None:
        if self.stepping is Stepping.MODEL:
            return
        with torch.device(self.device):
            needed = _find_out(self.optimizer, _options(self.optimizer.param_groups[number]))
        if needed is Stepping.TENSORS and self.stepping is Stepping.ELEMENTS:
            group = self.optimizer.param_groups[number]
            before = self._switches[min(number, len(self._switches) - 1)] if self._switches else {}
            changed = ", ".join(
                f"{key}={group[key]!r}" for key in switches if switches[key] != before.get(key)
            )
            raise ValueError(
                f"{type(self.optimizer).__name__} steps on shards, element by element, as tried"
                f" with the options of its groups when training began. Now group {number} has"
                f" {changed}, with which it looks at whole parameters. Let it have that from"
                " `configure_optimizers` on (1e-12, say, for a number that was 0): then it steps"
                " on whole parameters from the start."
            )


def stepping(optimizer: Optimizer, device: torch.device) -> Stepping:
    """Find out what ``optimizer`` must see, by letting copies of it train a matrix and a vector.

    One copy trains them together. The optimizer is elementwise if copies that train a slice of
    their elements each come to the same, and needs whole tensors if copies that train one of the
    two each do (Muon, Adafactor, LAMB). It is tried with the options of each of its groups and
    those that it keeps as attributes, with and without closures, past the steps that these name
    (`start_preconditioning_step=25`). It needs whole tensors in any case if its state is not a
    value for each element, or if it asks for more of a tensor than its elements: what it does then
    may depend on data that no trial has (AdamP, clipping).

    Args:
        optimizer: see :class:`Tried`.
        device: see there.

    Raises:
        ValueError: naming the optimizer and what to do: it combines parameters, or could not be
            tried.
    """
    if isinstance(optimizer, LBFGS):
        return Stepping.MODEL
    # without groups, too: what Lightning puts where `configure_optimizers` returns None
    found = Stepping.ELEMENTS
    with torch.device(device):
        for options in _variants(optimizer):
            if _find_out(optimizer, options) is Stepping.TENSORS:
                found = Stepping.TENSORS
    return found


def _variants(optimizer: Optimizer) -> Iterator[Options]:
    """The options of one group of each kind; how large a rate or a decay is makes no kind."""
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


def _switches(group: Options) -> Options:
    """Options that turn something on or off. Numbers may change in every step."""
    kept = {
        key: value
        for key, value in _options(group).items()
        if isinstance(value, str | int | float | None)
    }
    return {
        key: bool(value) if isinstance(value, int | float) else value
        for key, value in kept.items()
        if key != "lr"
    }


def _find_out(optimizer: Optimizer, options: Options) -> Stepping:
    for steps in (_STEPS, _LATEST):
        try:
            return _try(optimizer, options, steps)
        except _UnchangedError:
            continue  # RAdam, say, may begin with its sixth step
    raise ValueError(
        f"{type(optimizer).__name__} made no update of small tensors in {_LATEST} steps, so it"
        " cannot be trusted with shards. Use an optimizer that updates each parameter by itself,"
        " or another strategy."
    )


def _try(optimizer: Optimizer, options: Options, steps: int) -> Stepping:
    cls = type(optimizer)
    try:
        if _is_elementwise(optimizer, options, steps):
            return Stepping.ELEMENTS
    except _UnchangedError:
        raise
    except Exception:
        # it may take matrices only; what else fails is tried with whole tensors, which are exact,
        # and told if they fail
        pass
    shapes = [(4, 8), (2, 4) if _refuses_vectors(optimizer, options) else (8,)]
    try:
        apart = _agree(optimizer, options, shapes, shapes, steps)
    except _UnchangedError:
        raise
    except Exception as error:
        wrapped = next(
            (
                type(value).__name__
                for value in vars(optimizer).values()
                if isinstance(value, Optimizer)
            ),
            None,
        )
        instead = (
            f"Return the {wrapped} that it wraps, and do the rest in manual optimization"
            " (`automatic_optimization = False`),"
            if wrapped
            else (
                "Use one that takes that and updates each parameter by itself (SGD for sparse"
                " gradients)"
            )
        )
        raise ValueError(
            f"{cls.__name__} could not be tried on small tensors ({type(error).__name__}: {error}),"
            " so it cannot be trusted with shards. It is made as `cls([group], **defaults)`, or"
            f" `cls(params, **defaults)`, and steps with and without a closure. {instead} in"
            " `configure_optimizers`, or use another strategy."
        ) from error
    more = max([steps, _SOME, *(late + 2 for late in _late(optimizer, options, steps))])
    rare = [
        (moment, n) for moment in _MOMENTS for n in {steps, more} if (moment, n) != (1.0, steps)
    ]
    if not apart or any(_combines_in(moment, optimizer, options, shapes, n) for moment, n in rare):
        raise ValueError(
            f"{cls.__name__} combines several parameters in the update of one (a global norm, for"
            " instance, or a step that it skips when any gradient is large or not finite; or it"
            " draws random numbers, or uses what a closure returns, which each rank has of its"
            " own), and with Zero3Strategy no rank has them all. Use an optimizer that updates"
            " each parameter by itself, and clip by `Trainer(gradient_clip_val=...)`, or another"
            " strategy."
        )
    return Stepping.TENSORS


def _combines_in(
    moment: float, optimizer: Optimizer, options: Options, shapes: Shapes, steps: int
) -> bool:
    """Whether a gradient of one tensor that is so much larger, once, changes what becomes of
    others.
    """
    try:
        return not _agree(optimizer, options, shapes, shapes, steps, moment)
    except Exception:
        return False  # it would raise in the training, too


class _UnchangedError(Exception):
    """No step has changed anything."""


def _is_elementwise(optimizer: Optimizer, options: Options, steps: int) -> bool:
    late = _late(optimizer, options, steps)
    return (
        # first: one that does may take minutes for what is large (Shampoo)
        not _asks_for_more(optimizer, options)
        and _agree(optimizer, options, _LARGE, _SLICES, steps)
        and (not late or _agree(optimizer, options, _SMALL, _CUTS, max(late) + 2))
    )


def _late(optimizer: Optimizer, options: Options, steps: int) -> list[int]:
    """What may be numbers of steps after these."""
    named = [*options.values(), *attributes(optimizer).values()]
    return [value for value in named if type(value) is int and steps <= value <= _LATEST]


def _agree(
    optimizer: Optimizer,
    options: Options,
    together: Shapes,
    apart: Shapes,
    steps: int,
    moment: float = 1.0,
) -> bool:
    """Whether elements, trained together in some shapes, come out as if trained apart, one tensor
    of others at a time.

    In the last step but one gradients of the first tensor are ``moment`` times as large.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    numel = sum(torch.Size(shape).numel() for shape in together)
    values, *grads = (torch.randn(numel, generator=generator) for _ in range(1 + steps))
    grads[steps - 2][: torch.Size(together[0]).numel()] *= moment
    joint, single = _parts(values.clone(), together), _parts(values.clone(), apart)
    train(optimizer, options, joint, [_parts(grad, together) for grad in grads])
    for k, part in enumerate(single):
        # each rank's is another
        train(optimizer, options, [part], [[_parts(grad, apart)[k]] for grad in grads], loss=2.0)
    # Some optimizers put other tensors in the place of these (`p.data = ...`).
    first, second = (torch.cat([p.detach().flatten() for p in parts]) for parts in (joint, single))
    if torch.equal(first, values):
        raise _UnchangedError
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)


def _refuses_vectors(optimizer: Optimizer, options: Options) -> bool:
    try:
        train(optimizer, options, [nn.Parameter(torch.ones(8))], [[torch.ones(8)]])
    except Exception:
        return True
    return False


def _parts(flat: Tensor, shapes: Shapes) -> list[nn.Parameter]:
    """Views of ``flat``, end to end."""
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [nn.Parameter(part.view(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _asks_for_more(optimizer: Optimizer, options: Options) -> bool:
    """Whether code that is not torch's asks for more of a parameter or its gradient than elements,
    or has other state of it.
    """
    parameters, Asked.asked = [Asked(p.detach()) for p in _parts(torch.ones(40), _SMALL)], False
    try:
        steps = max([_ASKING, *(late + 2 for late in _late(optimizer, options, _ASKING))])
        copy = train(
            optimizer,
            options,
            parameters,
            [[torch.ones_like(p) for p in _parts(torch.ones(40), _SMALL)]] * steps,
        )
    except Exception:
        return True  # nobody knows what it would have asked
    with torch._C.DisableTorchFunctionSubclass():
        return Asked.asked or not all(_is_of_elements(p, copy.state.get(p, {})) for p in parameters)


def _is_of_elements(p: Tensor, state: Any) -> bool:
    """Whether shards can be cut out of an optimizer's state of ``p``."""
    shapes = [tuple(v.shape) if isinstance(v, Tensor) else () for v in state.values()]
    kinds = Tensor | int | float | str | None
    return all(isinstance(v, kinds) for v in state.values()) and all(
        shape in ((), tuple(p.shape)) for shape in shapes
    )
