"""Find where the first nan or inf of a step came from.

In every backward one kernel looks at the loss and one at the gradients of each unit. They show
that a value is not finite, and in which parameters' gradients. They do not show the rank, because
gradients come to the group as sums, nor the unit whose output had the value first, because outputs
are gone by then.

So the micro-batch is run once more, before any weight has changed. Now each unit's output is looked
at, and its gradients before they travel: the same weights, batch and random numbers give the same
values. Other state that a step reads (tensors that modules keep, counters, files) may have changed
meanwhile. So the message compares both losses, and says so if the value did not come again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..engine import Chunk, Zero3Engine, instances
from ..engine.hooks import transform
from ..engine.unit import Unit

# What is not finite on a rank. Ranks agree on the largest.
_FINE, _GRADIENTS, _LOSS = range(3)
_AGAIN = "The place was found by running the micro-batch once more."
_NOT_AGAIN = (
    "It did not come again when the micro-batch was run once more, eagerly, from the same weights"
    " and random states: the step reads something else that changes, draws from a generator of its"
    " own, or is not deterministic."
)


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is nan or inf."""


@dataclass(frozen=True, order=True)
class _Finding:
    """The first value of a step that is not finite, as far as one rank knows; sorts by place."""

    stage: int  # 0 forward, 1 loss, 2 gradients of a unit, 3 their sum over ranks, 4 none found
    turn: int  # place among all tensors that the check looked at
    rank: int
    unit: str
    value: float


@dataclass(frozen=True)
class _Report:
    """Findings of one rank in one run of a micro-batch."""

    first: _Finding
    trouble: int  # _FINE, _GRADIENTS or _LOSS
    loss: str
    names: dict[str, list[str]]  # of the parameters whose "weights" or "gradients" are not finite


class FiniteCheck:
    """Checks loss and gradients in each backward, and finds the unit where one is not finite.

    For each tensor one kernel finds the smallest and the largest element, which show any nan and
    inf; the host reads them all once per backward. (An infinity norm would be one number, and took
    18 times as long on a CPU.)

    Args:
        engine: the engine of the model.
        again: runs the last micro-batch again, with its backward if the argument is true, and
            returns its loss []; collective. With None, where a micro-batch cannot be run again, the
            check records the extremes of each unit in every step.
        gradients: whether gradients must be finite; False with a loss scaler, which skips steps
            whose gradients are not.
    """

    def __init__(
        self, engine: Zero3Engine, again: Callable[[bool], Tensor] | None, gradients: bool = True
    ) -> None:
        self.engine, self._communicator = engine, engine.collectives
        self._run_again, self._needs_finite_gradients = again, gradients
        # stage, unit, smallest and largest element of each tensor since the last check
        self._seen: list[tuple[int, str, Tensor, Tensor]] = []
        self._loss: Tensor | None = None
        self._watch_units(again is None)

    def close(self) -> None:
        """Stop watching units."""
        self._watch_units(False)

    def _watch_units(self, is_on: bool) -> None:
        self.engine.inspect = self._record_outputs if is_on else None
        self.engine.reducer.inspect = (
            (lambda unit, part: self._record(2, unit.name, part))
            if is_on and self._needs_finite_gradients
            else None
        )

    def _record_outputs(self, unit: Unit, outputs: Any) -> None:
        if torch.is_grad_enabled() and transform() is None:
            for tensor in instances(outputs, Tensor):
                self._record(0, unit.name, tensor)

    def _record_groups(self) -> None:
        for chunk in self.engine.gradients.chunks:
            if chunk.gradients is not None and chunk.has_sums:
                self._record(3, "", chunk.gradients)

    def _record(self, stage: int, unit: str, tensor: Tensor) -> None:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        if tensor.numel() and tensor.is_floating_point():
            with torch.no_grad():
                # of what is in host memory, two numbers go to the device
                low, high = (value.to(self.engine.device) for value in torch.aminmax(tensor))
            self._seen.append((stage, unit, low, high))

    def record_loss(self, loss: Tensor) -> None:
        """Record the ``loss`` [] of a micro-batch, before it is scaled."""
        self._loss = loss  # for the message of an error
        self._record(1, "", loss)

    def check(self, step: int) -> None:
        """Check all that was recorded, at the end of a backward; collective.

        Raises:
            NonFiniteError: on all ranks, if the loss or a gradient of any rank is not finite.
        """
        # Gradients that the reducer holds are not summed over ranks yet.
        if self._needs_finite_gradients and not self.engine.reducer.held:
            self._record_groups()
        found = self._pop_findings()
        mine = torch.tensor([_trouble(found)], dtype=torch.int64, device="cpu")
        if trouble := int(self._communicator.agree(mine)):
            self._raise_with_place(step, found, backward=trouble == _GRADIENTS)
        self._loss = None

    def _pop_findings(self) -> list[_Finding]:
        """Return a finding for each tensor that is not finite, and forget all tensors.

        hazard: to read the extremes is to wait for the device.
        """
        seen, self._seen = self._seen, []
        extremes = [value for *_, low, high in seen for value in (low, high)]
        values = torch.stack(extremes).tolist() if seen else []
        return [
            _Finding(stage, turn, self._communicator.global_rank, unit, value)
            for turn, (stage, unit, *_) in enumerate(seen)
            for value in values[2 * turn : 2 * turn + 2]
            if not math.isfinite(value)
        ]

    # ------------------------------------------------------------------------------------ diagnosis

    def _raise_with_place(self, step: int, found: list[_Finding], backward: bool) -> NoReturn:
        """Find the place of the first value that is not finite, and raise; on all ranks.

        hazard: a rank whose second run fails does not come to the exchange, and so ends the others.
        """
        seen = again = self._communicator.all_gather_object(self._report(found))
        said, cause = "", None
        if self._run_again is not None:
            try:
                again = self._communicator.all_gather_object(self._report_second_run(backward))
                said = _AGAIN if any(report.trouble for report in again) else _NOT_AGAIN
            except Exception as error:
                again, cause = [], error
                said = (
                    "The micro-batch was run once more, to find where that begins, and ended with"
                    f" {type(error).__name__}: {str(error).rstrip('.')}."
                )
        unit, what = _describe(seen, again)
        sentences = [
            f"In step {step} {what}.",
            *self._names(seen, unit),
            said,
            *_doubts(seen, again),
        ]
        raise NonFiniteError(
            " ".join(filter(None, [*sentences, "This step has changed no weight."]))
        ) from cause

    def _report_second_run(self, backward: bool) -> _Report:
        assert self._run_again is not None
        self._watch_units(True)
        try:
            with _restored(self.engine):
                self.record_loss(self._run_again(backward))
                if backward:
                    self._record_groups()
                return self._report(self._pop_findings())
        finally:
            self._watch_units(False)

    def _report(self, found: list[_Finding]) -> _Report:
        first = min(found, default=_Finding(4, 0, self._communicator.global_rank, "", 0.0))
        names = {
            "weights": self._find_nonfinite(lambda chunk: chunk.read()),
            "gradients": self._find_nonfinite(
                lambda chunk: chunk.gradients if chunk.has_sums else None
            ),
        }
        loss = str(None if self._loss is None else self._loss.tolist())
        return _Report(first, _trouble(found), loss, names)

    def _find_nonfinite(self, shard_of: Callable[[Chunk], Tensor | None]) -> list[str]:
        """Find the parameters whose part in the shard of their chunk is not finite."""
        return [
            entry.name
            for entry in self.engine.entries.values()
            if (shard := shard_of(entry.chunk)) is not None
            and not torch.isfinite(entry.part_of(shard)).all()
        ]

    def _names(self, seen: list[_Report], unit: str) -> Iterator[str]:
        """Name what is not finite of weights and gradients: three at most, ``unit``'s first."""
        own = {entry.name for u in self.engine.units if u.name == unit for entry in u.entries}
        for what in ("weights", "gradients"):
            found = dict.fromkeys(name for report in seen for name in report.names[what])
            if found:
                first = sorted(found, key=lambda name: name not in own)[:3]
                more = " ..." if len(found) > 3 else ""
                yield f"{what.capitalize()} that are not finite: {', '.join(first)}{more}."


def _trouble(found: list[_Finding]) -> int:
    stages = {finding.stage for finding in found}
    # An infinite output is no trouble by itself: it may be intended, as in a mask.
    return _LOSS if 1 in stages else _GRADIENTS if stages & {2, 3} else _FINE


def _describe(seen: list[_Report], again: list[_Report]) -> tuple[str, str]:
    """Return the unit where the first value in ``again`` is that is not finite, and a sentence.

    Where the second run shows nothing, it is what the first one has ``seen``, whose place is not
    known.
    """
    if not any(report.trouble for report in again):
        losses = [report.first for report in seen if report.trouble == _LOSS]
        if not losses:
            return "", "gradients are not finite"
        return "", f"the loss is {min(losses).value} on rank {min(losses).rank}"
    first = min(report.first for report in again)
    place = first.stage, first.turn
    ranks = [r.first.rank for r in again if (r.first.stage, r.first.turn) == place]
    where = (
        f"the output of unit {first.unit} in forward",
        "the loss; all outputs of units are finite",
        f"the gradients of unit {first.unit} in backward",
        "the sum of gradients over ranks, on each of which they are finite",
    )[first.stage]
    return first.unit, (
        f"the first value that is not finite, {first.value}, is in {where}, on rank"
        f" {', '.join(map(str, ranks))}"
    )


def _doubts(seen: list[_Report], again: list[_Report]) -> list[str]:
    """Say in what the second run (``again``) differs from the first one (``seen``)."""
    other = [
        f"{b.loss} after {a.loss} on rank {b.first.rank}"
        for a, b in zip(seen, again, strict=False)
        if a.loss != b.loss
    ]
    text = f"That run was not the first one's like: its loss was {', '.join(other[:3])}."
    return [text] if other else []


@contextmanager
def _restored(engine: Zero3Engine) -> Iterator[None]:
    """Put back weights, gradients and buffers at the end; inside, gradients add up from zero."""
    gradients = [chunk.gradients_or_zeros() for chunk in engine.gradients.chunks]
    values = [chunk.values for chunk in engine.chunks]
    copies = [(t, t.to("cpu", copy=True)) for t in [*values, *gradients]]
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
