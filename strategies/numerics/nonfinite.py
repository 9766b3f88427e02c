"""Find where the first nan or inf of a step came from.

In every backward one kernel looks at the loss and one at the summed gradients of each chunk. They
show that a value is not finite, and in which parameters' gradients. They do not show the rank,
because gradients come to the group as sums, nor the unit whose output had the value first, because
outputs are gone by then.

So the micro-batch is run once more, before any weight has changed. Now each unit's output is looked
at, and its gradients before they travel: the same weights, batch and random numbers give the same
values. Other state that a step reads (tensors that modules keep, counters, files) may have changed
meanwhile. So the message says so if the value did not come again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from ..engine import Chunk, Zero3Engine, instances
from ..engine.unit import Unit
from ..support.torch_internals import transform
from .rerun import SecondRun

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
    """A value of a step that is not finite; sorts by place."""

    stage: int  # 0 forward, 1 loss, 2 gradients of a unit, 3 their sum over ranks
    turn: int  # place among all tensors that the check looked at
    rank: int
    unit: str
    value: float


class FiniteCheck:
    """Checks loss and gradients in each backward, and finds the unit where one is not finite.

    For each tensor one kernel finds the smallest and the largest element, which show any nan and
    inf; the host reads them all once per backward. (An infinity norm would be one number, and took
    18 times as long on a CPU.) Where a micro-batch cannot be run again, the check records the
    extremes of each unit in every step.

    Args:
        trainer: the Trainer, which has the module already.
        engine: the engine of its model.
        step: the strategy's ``training_step``, which is called within :meth:`Zero3Engine.step`.
    """

    def __init__(self, trainer: pl.Trainer, engine: Zero3Engine, step: Callable[..., Any]) -> None:
        self.engine, self._communicator = engine, engine.collectives
        # The loss scaler of "16-mixed" skips steps whose gradients overflow.
        self._needs_finite_gradients = trainer.precision_plugin.precision != "16-mixed"
        # stage, unit, smallest and largest element of each tensor since the last check
        self._seen: list[tuple[int, str, Tensor, Tensor]] = []
        module = trainer.lightning_module
        can_run_again = (
            module.automatic_optimization
            and not engine.reducer.once
            and not is_param_in_hook_signature(
                module.training_step, "dataloader_iter", explicit=True
            )
        )
        self._run_again = SecondRun(trainer, engine, step) if can_run_again else None

    def close(self) -> None:
        """Stop watching units."""
        self._watch_units(False)

    def begin(self) -> None:
        """A micro-batch begins."""
        if self._run_again is None:
            self._watch_units(True)
        else:
            self._run_again.begin()

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
        for chunk in self.engine.gradients.chunks if self._needs_finite_gradients else ():
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
        self._record(1, "", loss)

    def check(self, step: int) -> None:
        """Check all that was recorded, at the end of a backward; collective.

        Raises:
            NonFiniteError: on all ranks, if the loss or a gradient of any rank is not finite.
        """
        # Gradients that the reducer holds are not summed over ranks yet.
        if not self.engine.reducer.held:
            self._record_groups()
        first = self._pop_first()
        if int(self._communicator.agree(torch.tensor([len(first)], device="cpu"))):
            self._raise_with_place(step, first)

    def _pop_first(self) -> list[_Finding]:
        """Return this rank's first value that is not finite, if the loss or a gradient is not; and
        forget all tensors. An infinite output alone may be intended, as in a mask.

        hazard: to read the extremes is to wait for the device.
        """
        seen, self._seen = self._seen, []
        extremes = [value for *_, low, high in seen for value in (low, high)]
        values = torch.stack(extremes).tolist() if seen else []
        found = [
            _Finding(stage, turn, self._communicator.global_rank, unit, value)
            for turn, (stage, unit, *_) in enumerate(seen)
            for value in values[2 * turn : 2 * turn + 2]
            if not math.isfinite(value)
        ]
        return [min(found)] if any(finding.stage for finding in found) else []

    # ------------------------------------------------------------------------------------ diagnosis

    def _raise_with_place(self, step: int, first: list[_Finding]) -> NoReturn:
        """Find the place of the first value that is not finite, and raise; on all ranks.

        hazard: a rank whose second run fails does not come to the exchange, and so ends the others.
        """
        names = {
            "Weights": self._find_nonfinite(lambda chunk: chunk.read()),
            "Gradients": self._find_nonfinite(
                lambda chunk: chunk.gradients if chunk.has_sums else None
            ),
        }
        everyone = self._communicator.all_gather_object((first, names))
        found, said, cause = [finding for its, _ in everyone for finding in its], "", None
        if self._run_again is not None:
            try:
                again = self._communicator.all_gather_object(self._look_again(self._run_again))
                found = sum(again, []) or found
                said = _AGAIN if any(again) else _NOT_AGAIN
            except Exception as error:
                cause = error
                said = (
                    "The micro-batch was run once more, to find where that begins, and ended with"
                    f" {type(error).__name__}: {str(error).rstrip('.')}."
                )
        sentences = [
            f"In step {step} {_describe(found)}.",
            *self._name([names for _, names in everyone], min(found).unit),
            said,
            "This step has changed no weight.",
        ]
        raise NonFiniteError(" ".join(filter(None, sentences))) from cause

    def _look_again(self, run_again: SecondRun) -> list[_Finding]:
        self._watch_units(True)
        try:
            with _restored(self.engine):
                self.record_loss(run_again())
                self._record_groups()
                return self._pop_first()
        finally:
            self._watch_units(False)

    def _find_nonfinite(self, shard_of: Callable[[Chunk], Tensor | None]) -> list[str]:
        """Find the parameters whose part in the shard of their chunk is not finite."""
        return [
            entry.name
            for entry in self.engine.entries.values()
            if (shard := shard_of(entry.chunk)) is not None
            and not torch.isfinite(entry.part_of(shard)).all()
        ]

    def _name(self, everyone: list[dict[str, list[str]]], unit: str) -> Iterator[str]:
        """Name what is not finite of weights and gradients: three at most, ``unit``'s first."""
        own = {entry.name for u in self.engine.units if u.name == unit for entry in u.entries}
        for what in ("Weights", "Gradients"):
            found = dict.fromkeys(name for names in everyone for name in names[what])
            if found:
                first = sorted(found, key=lambda name: name not in own)[:3]
                more = " ..." if len(found) > 3 else ""
                yield f"{what} that are not finite: {', '.join(first)}{more}."


def _describe(found: list[_Finding]) -> str:
    """Describe the first value that any rank has found."""
    first = min(found)
    ranks = [str(f.rank) for f in found if (f.stage, f.turn) == (first.stage, first.turn)]
    where = (
        f"the output of unit {first.unit} in forward",
        "the loss",
        f"the gradients of unit {first.unit} in backward",
        "the sum of gradients over ranks",
    )[first.stage]
    return f"the first value that is not finite, {first.value}, is in {where}, on rank" + (
        f" {', '.join(ranks)}"
    )


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
