"""Find where the first nan or inf of a step came from.

In every step one kernel looks at each unit's outputs, one at the loss, and one at each unit's
gradients before they travel to the other ranks. So the rank and the unit of the first value that
is not finite are known when backward ends, before any weight has changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import lightning.pytorch as pl
import torch
from torch import Tensor

from ..engine import Chunk, Zero3Engine, instances
from ..engine.unit import Unit
from ..support.torch_internals import transform


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is nan or inf."""


class _Finding(NamedTuple):
    """A value of a step that is not finite; sorts by place."""

    stage: int  # 0 forward, 1 loss, 2 gradients of a unit
    turn: int  # place among all tensors that the check looked at
    rank: int
    unit: str
    value: float


class FiniteCheck:
    """Checks loss and gradients in each backward, and finds the unit where one is not finite.

    For each tensor one kernel finds the smallest and the largest element, which show any nan and
    inf; the host reads them all once per backward. (An infinity norm would be one number, and took
    18 times as long on a CPU.)

    Args:
        trainer: the Trainer, which has its precision already.
        engine: the engine of its model.
    """

    def __init__(self, trainer: pl.Trainer, engine: Zero3Engine) -> None:
        self.engine, self._communicator = engine, engine.collectives
        # stage, unit, smallest and largest element of each tensor since the last check
        self._seen: list[tuple[int, str, Tensor, Tensor]] = []
        engine.inspect = self._record_outputs
        # The loss scaler of "16-mixed" skips steps whose gradients overflow.
        if trainer.precision_plugin.precision != "16-mixed":
            engine.reducer.inspect = self._record_gradients

    def close(self) -> None:
        """Stop watching units."""
        self.engine.inspect = self.engine.reducer.inspect = None

    def _record_outputs(self, unit: Unit, outputs: Any) -> None:
        if torch.is_grad_enabled() and transform() is None:
            for tensor in instances(outputs, Tensor):
                self._record(0, unit.name, tensor)

    def record_loss(self, loss: Tensor) -> None:
        """Record the ``loss`` [] of a micro-batch, before it is scaled."""
        self._record(1, "", loss)

    def _record_gradients(self, unit: Unit, gradients: Tensor) -> None:
        self._record(2, unit.name, gradients)

    def _record(self, stage: int, unit: str, tensor: Tensor) -> None:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        if tensor.numel() and tensor.is_floating_point():
            with torch.no_grad():
                # of what is in host memory, two numbers go to the device
                low, high = (value.to(self.engine.device) for value in torch.aminmax(tensor))
            self._seen.append((stage, unit, low, high))

    def check(self, step: int) -> None:
        """Check all that was recorded, at the end of a backward; collective.

        Raises:
            NonFiniteError: on all ranks, if the loss or a gradient of any rank is not finite.
        """
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

    def _raise_with_place(self, step: int, first: list[_Finding]) -> NoReturn:
        """Describe the first value that any rank has found, and raise; on all ranks."""
        weights = self._find_nonfinite(lambda chunk: chunk.read())
        gradients = self._find_nonfinite(lambda chunk: chunk.gradients if chunk.has_sums else None)
        everyone = self._communicator.all_gather_object((first, weights, gradients))
        found = [finding for its, *_ in everyone for finding in its]
        stage, turn, _, unit, value = min(found)
        where = (
            f"the output of unit {unit} in forward",
            "the loss",
            f"the gradients of unit {unit} in backward",
        )[stage]
        ranks = ", ".join(str(f.rank) for f in found if (f.stage, f.turn) == (stage, turn))
        sentences = [
            f"In step {step} the first value that is not finite, {value}, is in {where}, on rank"
            f" {ranks}.",
            *_name("Weights", [names for _, names, _ in everyone], unit),
            *_name("Gradients", [names for *_, names in everyone], unit),
            "This step has changed no weight.",
        ]
        raise NonFiniteError(" ".join(sentences))

    def _find_nonfinite(self, shard_of: Callable[[Chunk], Tensor | None]) -> list[str]:
        """Find the parameters whose part in the shard of their chunk is not finite."""
        return [
            entry.name
            for entry in self.engine.entries.values()
            if (shard := shard_of(entry.chunk)) is not None
            and not torch.isfinite(entry.part_of(shard)).all()
        ]


def _name(what: str, everyone: list[list[str]], unit: str) -> Iterator[str]:
    """Name parameters that any rank has found: three at most, those of ``unit`` first."""
    names = dict.fromkeys(chain(*everyone))
    if names:
        first = sorted(names, key=lambda name: not name.startswith(f"{unit}."))[:3]
        more = " ..." if len(names) > 3 else ""
        yield f"{what} that are not finite: {', '.join(first)}{more}."
