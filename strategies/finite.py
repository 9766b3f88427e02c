"""Where the first nan or inf of a step came from: one pass over each unit's output, each unit's and each group's gradients.

One kernel for each flat group would tell that there is one, and in which parameters' gradients. It could not tell the rank,
because gradients come to the group as sums; hence a look at a unit's gradients before they travel. Nor could it tell the unit
where it appeared in forward, whose output is gone by then; hence a look at each output. To look at all of them at once, they
would have to be kept until the loss is known: logits too, which autograd keeps no copy of, where memory is at its peak; and the
device would read as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .engine import Zero3Engine
from .engine.hooks import transform
from .engine.shards import FlatGroup
from .residency import instances


class NonFiniteError(FloatingPointError):
    """A loss or a gradient is nan or inf."""


@dataclass(frozen=True, order=True)
class _Finding:
    """What one rank knows of its step's first value that is not finite; the earliest is the smallest."""

    stage: int  # 0 forward, 1 loss, 2 gradients of a unit, 3 their sum over ranks, 4 nothing
    turn: int  # of the unit in that stage
    rank: int
    unit: str
    value: float


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
        values = torch.stack([cell for pair in self._cells[: len(places)] for cell in pair]).tolist() if places else []
        return [
            _Finding(stage, turn, rank, unit, low if math.isfinite(high) else high)
            for (stage, turn, unit), low, high in zip(places, values[::2], values[1::2], strict=True)
            if not (math.isfinite(low) and math.isfinite(high))
        ]


class FiniteCheck:
    """Looks at the outputs of all units, at the loss and at all gradients.

    One kernel each writes the smallest and the largest element, which nan and inf reach; the host reads them all once per
    backward. (An infinity norm would be one number, and took 18 times as long on a CPU.)

    Args:
        engine: of the model.
        gradients: whether gradients must be finite; not with a loss scaler, which skips steps where they are not.
    """

    def __init__(self, engine: Zero3Engine, gradients: bool = True) -> None:
        self.engine, self._gradients, self._door = engine, gradients, engine.collectives
        self._looks: dict[torch.dtype, _Looks] = {}
        self._turns: dict[tuple[int, str], int] = {}
        self._handles = [
            module.register_forward_hook(torch.compiler.disable(self._after(unit.name)))
            for unit in engine.units
            for module in unit.members
        ]
        if gradients:
            engine.reducer.inspect = lambda unit, gradients: self._look(2, unit.name, gradients)

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        self.engine.reducer.inspect = None

    def _after(self, unit: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, outputs: Any) -> None:
            if torch.is_grad_enabled() and transform() is None:
                for tensor in instances(outputs, Tensor):
                    self._look(0, unit, tensor)

        return hook

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
        self._look(1, "", loss)

    def check(self, step: int) -> None:
        """At the end of a backward; collective.

        Raises:
            NonFiniteError: on all ranks, if the loss or a gradient of any is not finite.
        """
        if self._gradients and not self.engine.reducer.held:  # else they are not summed yet
            for group in self.engine.groups:
                if group.trained:
                    self._look(3, "", group.grad)
        findings = [found for looks in self._looks.values() for found in looks.take(self._door.global_rank)]
        self._turns.clear()
        # An infinite output alone may be meant, as in a mask.
        matters = any(found.stage > 0 for found in findings)
        if int(self._door.agree(torch.tensor([int(matters)], dtype=torch.int64, device="cpu"))):
            first = min(findings, default=_Finding(4, 0, self._door.global_rank, "", 0.0))
            raise NonFiniteError(self._explain(step, first))

    def _explain(self, step: int, finding: _Finding) -> str:
        weights, gradients = (self._parameters(flat) for flat in (lambda g: g.data, lambda g: g.grad if g.trained else None))
        everyone: list[Any] = self._door.all_gather_object((finding, weights, gradients))
        first = min(found for found, *_ in everyone)
        ranks = [found.rank for found, *_ in everyone if (found.stage, found.turn) == (first.stage, first.turn)]
        alone = self._door.world_size == 1
        where = (
            f"the output of unit {first.unit} in forward",
            "the loss; all outputs of units are finite",
            f"the gradients of unit {first.unit} in backward",
            "the gradients" if alone else "the sum of gradients over ranks, on each of which they are finite",
            "",
        )[first.stage]
        on = ", ".join(map(str, ranks))
        text = f"In step {step} the first value that is not finite, {first.value}, is in {where}, on rank {on}."
        own = [entry.name for unit in self.engine.units if unit.name == first.unit for entry in unit.entries]
        for what, names in (("Weights", 1), ("Gradients", 2)):
            found = list(dict.fromkeys(name for item in everyone for name in item[names]))
            if found:
                inside = [name for name in found if name in own]
                text += f" {what} that are not finite: {', '.join((inside or found)[:3])}{' ...' if len(found) > 3 else ''}."
        return f"{text} This step has changed no weight."

    def _parameters(self, flat: Callable[[FlatGroup], Tensor | None]) -> list[str]:
        found = []
        for group in self.engine.groups:
            values = flat(group)
            if values is not None:
                owned = self.engine.gradients.owned(group)
                found += [entry.name for entry in owned if not torch.isfinite(entry.part.of(values)).all()]
        return found
