"""Where the first nan or inf of a step came from.

In every backward one kernel looks at the loss and one at each flat group of gradients. They tell
that there is one, and in which parameters' gradients; not the rank, because gradients come to the
group as sums, nor the unit whose output had it first, because outputs are gone by then. So the
micro-batch is run once more, before any weight has changed, and now each unit's output is looked
at, and its gradients before they travel: the same weights, batch and random numbers give the same
values. What else a step reads (tensors that modules keep, counters, files) may have changed
meanwhile. So both losses are compared, tensors that hold nan are named, and what does not come
again is said to be just that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..engine import Zero3Engine, instances
from ..engine.hooks import transform
from ..engine.shards import FlatGroup
from ..engine.unit import Unit

_FINE, _GRADIENTS, _LOSS = range(3)  # what is not finite; the largest of all ranks' counts
_NOT_AGAIN = (
    "It did not come again when the micro-batch was run once more, eagerly, from the same weights"
    " and random states: the step reads something else that changes, draws from a generator of its"
    " own, or is not deterministic."
)


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is nan or inf."""


@dataclass(frozen=True, order=True)
class _Finding:
    """What one rank knows of its step's first value that is not finite; the earliest is the
    smallest.
    """

    stage: int  # 0 forward, 1 loss, 2 gradients of a unit, 3 their sum over ranks, 4 nothing
    turn: int  # of the unit in that stage
    rank: int
    unit: str
    value: float


@dataclass(frozen=True)
class _Report:
    """What one rank knows of one run of a micro-batch."""

    first: _Finding
    trouble: int
    loss: str
    weights: list[str]  # that are not finite
    gradients: list[str]  # likewise
    kept: list[str]  # tensors that modules keep and that hold nan; masks hold inf


class _Looks:
    """What was seen in tensors of one dtype since the last check.

    Args:
        dtype: of their elements; real.
        device: of the tensors.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._cells: list[tuple[Tensor, Tensor]] = []
        self._places: list[tuple[int, int, str]] = []  # stage, turn, unit

    def cell(self, stage: int, turn: int, unit: str) -> tuple[Tensor, Tensor]:
        """Where the next smallest and largest element, [] each, are to be written."""
        if len(self._places) == len(self._cells):
            cells = torch.empty(128, dtype=self._dtype, device=self._device).unbind()
            self._cells += zip(cells[::2], cells[1::2], strict=True)
        self._places.append((stage, turn, unit))
        return self._cells[len(self._places) - 1]

    def take(self, rank: int) -> list[_Finding]:
        """Those that are not finite; waits for the device."""
        places, self._places = self._places, []
        values = (
            torch.stack([cell for pair in self._cells[: len(places)] for cell in pair]).tolist()
            if places
            else []
        )
        return [
            _Finding(stage, turn, rank, unit, low if math.isfinite(high) else high)
            for (stage, turn, unit), low, high in zip(
                places, values[::2], values[1::2], strict=True
            )
            if not (math.isfinite(low) and math.isfinite(high))
        ]


class FiniteCheck:
    """Looks at the loss and at all gradients; where one is not finite, also at the outputs and
    gradients of each unit.

    One kernel each writes the smallest and the largest element, which nan and inf reach; the host
    reads them all once per backward. (An infinity norm would be one number, and took 18 times as
    long on a CPU.)

    Args:
        engine: of the model.
        again: runs the last micro-batch again, with its backward if told so, and returns its loss
            []; collective. None where there is no such thing: then units are looked at in every
            step.
        gradients: whether gradients must be finite; not with a loss scaler, which skips steps where
            they are not.
    """

    def __init__(
        self, engine: Zero3Engine, again: Callable[[bool], Tensor] | None, gradients: bool = True
    ) -> None:
        self.engine, self._again, self._gradients, self._communicator = (
            engine,
            again,
            gradients,
            engine.collectives,
        )
        self._looks: dict[torch.dtype, _Looks] = {}
        self._turns: dict[tuple[int, str], int] = {}
        self._loss: Tensor | None = None
        self._look_at_units(again is None)

    def close(self) -> None:
        """Look no more."""
        self._look_at_units(False)

    def _look_at_units(self, looking: bool) -> None:
        self.engine.inspect = self._look_at_outputs if looking else None
        travelling = looking and self._gradients
        self.engine.reducer.inspect = (
            (lambda unit, part: self._look(2, unit.name, part)) if travelling else None
        )

    def _look_at_outputs(self, unit: Unit, outputs: Any) -> None:
        if torch.is_grad_enabled() and transform() is None:
            for tensor in instances(outputs, Tensor):
                self._look(0, unit.name, tensor)

    def _look_at_groups(self) -> None:
        for group in self.engine.groups:
            if group.trained:
                self._look(3, "", group.grad)

    def _look(self, stage: int, unit: str, tensor: Tensor) -> None:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        if tensor.numel() and tensor.is_floating_point():
            looks = self._looks.get(tensor.dtype)
            if looks is None:
                looks = self._looks[tensor.dtype] = _Looks(tensor.dtype, self.engine.device)
            turn = self._turns.setdefault((stage, unit), len(self._turns))
            with torch.no_grad():
                torch.aminmax(tensor, out=looks.cell(stage, turn, unit))

    def loss(self, loss: Tensor) -> None:
        """Before it is scaled."""
        self._loss = loss  # to be read where something is wrong
        self._look(1, "", loss)

    def check(self, step: int) -> None:
        """At the end of a backward; collective.

        Raises:
            NonFiniteError: on all ranks, if the loss or a gradient of any is not finite.
        """
        if self._gradients and not self.engine.reducer.held:  # else they are not summed yet
            self._look_at_groups()
        found = self._take()
        if trouble := int(
            self._communicator.agree(
                torch.tensor([_trouble(found)], dtype=torch.int64, device="cpu")
            )
        ):
            self._raise(step, found, backward=trouble == _GRADIENTS)
        self._turns.clear()
        self._loss = None

    def _take(self) -> list[_Finding]:
        return [
            found
            for looks in self._looks.values()
            for found in looks.take(self._communicator.global_rank)
        ]

    # ------------------------------------------------------------------------------------ diagnosis

    def _raise(self, step: int, found: list[_Finding], backward: bool) -> NoReturn:
        """Find the place, on all ranks; one that fails in this does not come to the exchange, and
        so ends the others.
        """
        seen = self._communicator.all_gather_object(self._report(found))
        if self._again is None:
            raise NonFiniteError(self._explain(step, seen, seen))
        try:
            again = self._communicator.all_gather_object(self._look_again(backward))
        except Exception as error:
            ended = (
                f"to find where that begins, and ended with {type(error).__name__}:"
                f" {str(error).rstrip('.')}."
            )
            ended = f"The micro-batch was run once more, {ended}"
            raise NonFiniteError(self._describe(step, seen, ended)) from error
        if not any(report.trouble for report in again):
            raise NonFiniteError(
                self._describe(step, seen, " ".join([_NOT_AGAIN, *_doubts(seen, again)]))
            )
        raise NonFiniteError(self._explain(step, seen, again))

    def _look_again(self, backward: bool) -> _Report:
        assert self._again is not None
        self._turns.clear()
        self._look_at_units(True)
        try:
            with _unchanged(self.engine):
                self.loss(self._again(backward))
                if backward:
                    self._look_at_groups()
                return self._report(self._take())
        finally:
            self._look_at_units(False)

    def _report(self, found: list[_Finding]) -> _Report:
        first = min(found, default=_Finding(4, 0, self._communicator.global_rank, "", 0.0))
        weights, gradients = (
            self._parameters(lambda g: g.data),
            self._parameters(lambda g: g.grad if g.trained else None),
        )
        # nothing travels: the last unit of the forward had them first
        if first.stage == 3 and self._communicator.alone:
            owners = [
                unit
                for unit in self.engine.units
                if any(entry.name in gradients for entry in unit.entries)
            ]
            last = max(owners, key=lambda unit: self._turns.get((0, unit.name), -1), default=None)
            first = replace(first, stage=2, unit="" if last is None else last.name)
        loss = str(None if self._loss is None else self._loss.tolist())
        return _Report(
            first, _trouble(found), loss, weights, gradients, _kept_nan(self.engine.structure.model)
        )

    def _parameters(self, flat: Callable[[FlatGroup], Tensor | None]) -> list[str]:
        found = []
        for group in self.engine.groups:
            values = flat(group)
            if values is not None:
                owned = group.owned
                found += [
                    entry.name for entry in owned if not torch.isfinite(entry.part.of(values)).all()
                ]
        return found

    def _describe(self, step: int, seen: list[_Report], more: str) -> str:
        """Without a place."""
        first = min((report.first for report in seen if report.trouble == _LOSS), default=None)
        what = (
            "gradients are not finite"
            if first is None
            else f"the loss is {first.value} on rank {first.rank}"
        )
        return " ".join(
            [
                f"In step {step} {what}.",
                *self._names(seen, ""),
                more,
                "This step has changed no weight.",
            ]
        )

    def _explain(self, step: int, seen: list[_Report], found: list[_Report]) -> str:
        """With the place that was ``found`` in this run, or in the second one."""
        first = min(report.first for report in found)
        ranks = [
            r.first.rank
            for r in found
            if (r.first.stage, r.first.turn) == (first.stage, first.turn)
        ]
        where = (
            f"the output of unit {first.unit} in forward",
            "the loss; all outputs of units are finite",
            f"the gradients of unit {first.unit} in backward",
            "the sum of gradients over ranks, on each of which they are finite",
        )[first.stage]
        on = ", ".join(map(str, ranks))
        text = (
            f"In step {step} the first value that is not finite, {first.value}, is in {where}, on"
            f" rank {on}."
        )
        second = (
            []
            if found is seen
            else [
                "The place was found by running the micro-batch once more.",
                *_doubts(seen, found),
            ]
        )
        return " ".join(
            [text, *self._names(seen, first.unit), *second, "This step has changed no weight."]
        )

    def _names(self, seen: list[_Report], unit: str) -> list[str]:
        """What of ``unit`` is not finite, or else of others."""
        own = [entry.name for u in self.engine.units if u.name == unit for entry in u.entries]
        sentences = []
        for what in ("weights", "gradients"):
            found = list(dict.fromkeys(name for report in seen for name in getattr(report, what)))
            if found:
                inside = [name for name in found if name in own]
                more = " ..." if len(found) > 3 else ""
                sentences.append(
                    f"{what.capitalize()} that are not finite:"
                    f" {', '.join((inside or found)[:3])}{more}."
                )
        return sentences


def _trouble(found: list[_Finding]) -> int:
    stages = {finding.stage for finding in found}
    # An infinite output alone may be meant, as in a mask.
    return _LOSS if 1 in stages else _GRADIENTS if stages & {2, 3} else _FINE


def _doubts(seen: list[_Report], again: list[_Report]) -> list[str]:
    """Why the second run may not have been the first one's like."""
    sentences = []
    other = [
        f"{b.loss} after {a.loss} on rank {b.first.rank}"
        for a, b in zip(seen, again, strict=True)
        if a.loss != b.loss
    ]
    if other:
        sentences.append(
            f"That run was not the first one's like: its loss was {', '.join(other[:3])}."
        )
    kept = list(dict.fromkeys(name for report in seen for name in report.kept))
    if kept:
        names = ", ".join(kept[:3])
        sentences.append(
            f"It began with nan in what modules keep ({names}), which the first run may have left"
            " there."
        )
    return sentences


def _kept_nan(model: nn.Module) -> list[str]:
    """Names of buffers and of attributes of modules that hold nan."""
    found = []
    for prefix, module in model.named_modules():
        others = {
            name: value
            for name, value in vars(module).items()
            if name not in ("_parameters", "_buffers", "_modules")
        }
        for name, value in {**module._buffers, **others}.items():
            with suppress(RuntimeError):  # what contains itself, or tensors of another kind
                if any(_has_nan(tensor) for tensor in instances(value, Tensor)):
                    found.append(f"{prefix}.{name}".lstrip("."))
    return found


def _has_nan(tensor: Tensor) -> bool:
    if isinstance(tensor, nn.Parameter) or tensor.is_meta or tensor.layout is not torch.strided:
        return False
    return tensor.is_floating_point() and bool(tensor.isnan().any())


@contextmanager
def _unchanged(engine: Zero3Engine) -> Iterator[None]:
    """Afterwards weights, gradients and buffers are what they were; inside, gradients add up from
    zero.
    """
    gradients = [group.grad for group in engine.groups if group.trained]
    copies = [
        (t, t.to("cpu", copy=True)) for t in [*(group.data for group in engine.groups), *gradients]
    ]
    restore_buffers = engine.buffers.keep()
    for gradient in gradients:
        gradient.zero_()
    try:
        yield
    finally:
        for tensor, copy in copies:
            tensor.copy_(copy)
        restore_buffers()
        engine.weights_changed()
