"""Find out how an optimizer may step on flat shards by letting copies of it train tensors."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .probe_tensor import ProbeParameter
from .trial import Options, own_attributes, train_copy

Shapes = Sequence[tuple[int, ...]]

# Shapes of a matrix and a vector, and flat slices of the same number of elements in all. The large
# ones reach the sizes from which optimizers treat a tensor differently (factors of large matrices,
# quantized blocks); the small ones make a trial of many steps cheap.
_LARGE, _LARGE_SLICES = [(160, 130), (8200,)], [(13_003,), (15_997,)]
_SMALL, _SMALL_SLICES = [(4, 8), (8,)], [(13,), (27,)]
_STEPS = 3  # steps of a trial
_LAST_START = 200  # integer options up to this may be the step in which a rule starts
_UNNAMED_START = 30  # steps after which rules may have started that no option names
# Factors of one gradient: a training may have such gradients, and an optimizer a rule for them.
_FACTORS = (1.0, 1e3, 1e6, float("inf"), float("nan"))
_PROBED_STEPS = 20  # steps in which a `ProbeParameter` notes what the optimizer asks for


class Stepping(enum.Enum):
    """What an optimizer must see of the model to update one element of it."""

    ELEMENTS = "that element: it can step on flat shards"
    TENSORS = "the parameter that it is in: it must step on whole parameters"
    MODEL = "all parameters at once, as one long vector"


class SteppingTrial:
    """How an optimizer may step, tried with the options of its groups.

    Args:
        optimizer: the optimizer, with its param groups.
        device: device of the trials, as some optimizers work on a GPU only (``capturable=True``).

    Raises:
        ValueError: as :func:`find_stepping`.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self.stepping = find_stepping(optimizer, device)
        # one for each group, as of the last call of `try_new_options`
        self._switches = [_switches(group) for group in optimizer.param_groups]
        self._tried_switches = list(self._switches)

    def try_new_options(self) -> None:
        """Try the optimizer again with switches that no group had in an earlier trial.

        A user may turn on a rule in some epoch, or add a group with options of its own.

        Raises:
            ValueError: with the new options the optimizer must see whole parameters but steps on
                shards (the message names these options), or as :func:`find_stepping`.
        """
        now = [_switches(group) for group in self.optimizer.param_groups]
        if now == self._switches:
            return
        for number, switches in enumerate(now):
            if switches not in self._tried_switches:
                self._try_group(number, switches)
                self._tried_switches.append(switches)
        self._switches = now

    def _try_group(self, number: int, switches: Options) -> None:
        if self.stepping is Stepping.MODEL:
            return
        with torch.device(self.device):
            needed = _classify(self.optimizer, _options(self.optimizer.param_groups[number]))
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


def find_stepping(optimizer: Optimizer, device: torch.device) -> Stepping:
    """Find out what ``optimizer`` must see by letting copies of it train a matrix and a vector.

    One copy trains both tensors together. The optimizer is elementwise if other copies, each of
    which trains one slice of the same elements, end with the same values. It needs whole tensors
    (Muon, Adafactor, LAMB) if only copies that each train one of the two tensors do.

    The trials use the options of each group and the attributes of the optimizer, with and without
    closures, and go past the steps that options name (`start_preconditioning_step=25`).

    The optimizer needs whole tensors in any case if its state is not one value for each element, or
    if it asks for more of a tensor than its elements: then its update may depend on data that no
    trial has (AdamP, clipping).

    Args:
        optimizer: see :class:`SteppingTrial`.
        device: see there.

    Raises:
        ValueError: the optimizer combines parameters, or could not be tried; the message names it
            and says what to do.
    """
    if isinstance(optimizer, LBFGS):
        return Stepping.MODEL
    # There may be no groups: where `configure_optimizers` returns None, Lightning's
    # `_init_optimizers_and_lr_schedulers` puts a `_MockOptimizer`.
    found = Stepping.ELEMENTS
    with torch.device(device):
        for options in _variants(optimizer):
            if _classify(optimizer, options) is Stepping.TENSORS:
                found = Stepping.TENSORS
    return found


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


def _switches(group: Options) -> Options:
    """Return the options that turn a rule on or off, a number as whether it is not 0.

    Its size does not count, as it may change in every step.
    """
    return {
        key: bool(value) if isinstance(value, int | float) else value
        for key, value in _options(group).items()
        if key != "lr" and isinstance(value, str | int | float | None)
    }


def _classify(optimizer: Optimizer, options: Options) -> Stepping:
    for steps in (_STEPS, _LAST_START):
        try:
            return _classify_in(optimizer, options, steps)
        except _UnchangedError:
            continue  # an optimizer such as RAdam may make its first update in its sixth step
    raise ValueError(
        f"{type(optimizer).__name__} made no update of small tensors in {_LAST_START} steps, so it"
        " cannot be trusted with shards. Use an optimizer that updates each parameter by itself,"
        " or another strategy."
    )


def _classify_in(optimizer: Optimizer, options: Options, steps: int) -> Stepping:
    cls = type(optimizer)
    try:
        if _is_elementwise(optimizer, options, steps):
            return Stepping.ELEMENTS
    except _UnchangedError:
        raise
    except Exception:
        # The optimizer may refuse vectors. Any other error is left to the trial with whole tensors
        # below: these are exact, and if they fail too, the user gets their error.
        pass
    shapes = [(4, 8), (2, 4) if _refuses_vectors(optimizer, options) else (8,)]
    try:
        is_tensorwise = _agree(optimizer, options, shapes, shapes, steps)
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
    starts = _later_starts(optimizer, options, steps)
    longest = max([steps, _UNNAMED_START, *(start + 2 for start in starts)])
    rare = [(factor, n) for factor in _FACTORS for n in {steps, longest}]
    rare.remove((1.0, steps))
    if not is_tensorwise or any(
        _combines_tensors(factor, optimizer, options, shapes, n) for factor, n in rare
    ):
        raise ValueError(
            f"{cls.__name__} combines several parameters in the update of one (a global norm, for"
            " instance, or a step that it skips when any gradient is large or not finite; or it"
            " draws random numbers, or uses what a closure returns, which each rank has of its"
            " own), and with Zero3Strategy no rank has them all. Use an optimizer that updates"
            " each parameter by itself, and clip by `Trainer(gradient_clip_val=...)`, or another"
            " strategy."
        )
    return Stepping.TENSORS


def _combines_tensors(
    factor: float, optimizer: Optimizer, options: Options, shapes: Shapes, steps: int
) -> bool:
    """Say whether one gradient of one tensor, ``factor`` times as large, changes other tensors."""
    try:
        return not _agree(optimizer, options, shapes, shapes, steps, factor)
    except Exception:
        return False  # the optimizer would raise in the training, too


class _UnchangedError(Exception):
    """No step of a trial has changed a tensor."""


def _is_elementwise(optimizer: Optimizer, options: Options, steps: int) -> bool:
    starts = _later_starts(optimizer, options, steps)
    # The probe comes first: an optimizer that asks for more than elements (Shampoo) may take
    # minutes for large tensors.
    return (
        not _asks_for_more(optimizer, options)
        and _agree(optimizer, options, _LARGE, _LARGE_SLICES, steps)
        and (not starts or _agree(optimizer, options, _SMALL, _SMALL_SLICES, max(starts) + 2))
    )


def _later_starts(optimizer: Optimizer, options: Options, steps: int) -> list[int]:
    """Return the integer options that may be steps, from ``steps`` on, in which a rule starts."""
    named = [*options.values(), *own_attributes(optimizer).values()]
    return [value for value in named if type(value) is int and steps <= value <= _LAST_START]


def _agree(
    optimizer: Optimizer,
    options: Options,
    joint_shapes: Shapes,
    single_shapes: Shapes,
    steps: int,
    factor: float = 1.0,
) -> bool:
    """Say whether training tensors together and one at a time gives the same elements.

    One copy trains all tensors of ``joint_shapes``; one copy each trains a tensor of
    ``single_shapes``, into which the same elements are cut. In the last step but one the gradients
    of the first tensor are ``factor`` times as large.
    """
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    numel = sum(torch.Size(shape).numel() for shape in joint_shapes)
    values, *grads = (torch.randn(numel, generator=generator) for _ in range(1 + steps))
    grads[steps - 2][: torch.Size(joint_shapes[0]).numel()] *= factor
    joint = _split(values.clone(), joint_shapes)
    single = _split(values.clone(), single_shapes)
    train_copy(optimizer, options, joint, [_split(grad, joint_shapes) for grad in grads])
    for k, part in enumerate(single):
        part_grads = [[_split(grad, single_shapes)[k]] for grad in grads]
        # Another loss than the joint copy's: in a training each rank has a loss of its own.
        train_copy(optimizer, options, [part], part_grads, loss=2.0)
    # Read the parameters, not `values`: some optimizers assign other tensors (`p.data = ...`).
    first, second = (torch.cat([p.detach().flatten() for p in parts]) for parts in (joint, single))
    if torch.equal(first, values):
        raise _UnchangedError
    return torch.allclose(first, second, rtol=1e-4, atol=1e-6, equal_nan=True)


def _refuses_vectors(optimizer: Optimizer, options: Options) -> bool:
    try:
        train_copy(optimizer, options, [nn.Parameter(torch.ones(8))], [[torch.ones(8)]])
    except Exception:
        return True
    return False


def _split(flat: Tensor, shapes: Shapes) -> list[nn.Parameter]:
    """Return views of ``flat`` [numel] of these shapes, end to end."""
    parts = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [nn.Parameter(part.view(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _asks_for_more(optimizer: Optimizer, options: Options) -> bool:
    """Say whether an optimizer uses more of a parameter or its gradient than the elements.

    It does if code that is not torch's asks for more, or keeps state that cannot be cut into
    shards.
    """
    parameters = [ProbeParameter(p.detach()) for p in _split(torch.ones(40), _SMALL)]
    ProbeParameter.is_questioned = False
    try:
        starts = _later_starts(optimizer, options, _PROBED_STEPS)
        steps = max([_PROBED_STEPS, *(start + 2 for start in starts)])
        copy = train_copy(
            optimizer,
            options,
            parameters,
            [[torch.ones_like(p) for p in _split(torch.ones(40), _SMALL)]] * steps,
        )
    except Exception:
        return True  # nobody knows for what the optimizer would have asked
    with torch._C.DisableTorchFunctionSubclass():
        return ProbeParameter.is_questioned or not all(
            _has_elementwise_state(p, copy.state.get(p, {})) for p in parameters
        )


def _has_elementwise_state(p: Tensor, state: Any) -> bool:
    """Say whether shards can be cut out of an optimizer's state of ``p``."""
    shapes = [tuple(v.shape) if isinstance(v, Tensor) else () for v in state.values()]
    kinds = Tensor | int | float | str | None
    return all(isinstance(v, kinds) for v in state.values()) and all(
        shape in ((), tuple(p.shape)) for shape in shapes
    )
