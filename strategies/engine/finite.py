"""Where the first nan or inf of a step came from: one pass over each unit's output, each unit's and each group's gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .collectives import Pending
from .engine import Zero3Engine, transform
from .hooks import tensors
from .shards import FlatGroup
from .unit import Exchange


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


class FiniteCheck:
    """Looks at the outputs of all units, at the loss and at all gradients.

    Largest magnitudes are written to one small tensor on the device, which the host reads once per backward.

    Args:
        engine: of the model.
        model: the module that the engine shards.
        gradients: whether gradients must be finite; not with a loss scaler, which skips steps where they are not.
    """

    def __init__(self, engine: Zero3Engine, model: nn.Module, gradients: bool = True) -> None:
        self.engine, self._gradients = engine, gradients
        self._door, count = engine.collectives, len(engine.units)
        self._marks = torch.zeros(2 * count + 2, dtype=torch.float64, device=engine.device)
        self._forward, self._backward = self._marks[:count], self._marks[count : 2 * count]
        self._loss, self._sums = self._marks[2 * count], self._marks[2 * count + 1]
        self._forward_turns: dict[int, int] = {}  # unit -> its turn
        self._backward_turns: dict[int, int] = {}
        modules = dict(model.named_modules())
        named = [(unit.index, modules.get(name, model)) for unit in engine.units for name in unit.name.split("+")]
        self._handles = [m.register_forward_hook(torch.compiler.disable(self._look(i))) for i, m in named]
        self._reduce_scatter = self._door.reduce_scatter
        self._door.reduce_scatter = self._look_and_reduce  # type: ignore[method-assign]

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        self._door.reduce_scatter = self._reduce_scatter  # type: ignore[method-assign]

    def _look(self, unit: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, outputs: Any) -> None:
            if torch.is_grad_enabled() and transform() is None:
                self._forward_turns.setdefault(unit, len(self._forward_turns))
                for tensor in tensors(outputs):
                    _mark(self._forward[unit], tensor)

        return hook

    def _look_and_reduce(self, buffer: Tensor, label: int = 0) -> Pending:
        unit = label // len(Exchange)
        self._backward_turns.setdefault(unit, len(self._backward_turns))
        _mark(self._backward[unit], buffer)
        return self._reduce_scatter(buffer, label)

    def loss(self, loss: Tensor) -> None:
        """Before it is scaled."""
        _mark(self._loss, loss)

    def check(self, step: int) -> None:
        """At the end of a backward; collective.

        Raises:
            NonFiniteError: on all ranks, if the loss or a gradient of any is not finite.
        """
        if self._gradients:
            for group in self.engine.groups:
                if group.grad is not None:
                    _mark(self._sums, group.grad)
        values = self._marks.tolist()
        self._marks.zero_()
        findings = list(self._find(values))
        self._forward_turns, self._backward_turns = {}, {}
        # An infinite output alone may be meant, as in a mask.
        matters = any(found.stage == 1 or (found.stage > 1 and self._gradients) for found in findings)
        if int(self._door.agree(torch.tensor([int(matters)], dtype=torch.int64))):
            first = min(findings, default=_Finding(4, 0, self._door.global_rank, "", 0.0))
            raise NonFiniteError(self._explain(step, first))

    def _find(self, values: list[float]) -> Iterator[_Finding]:
        rank, count = self._door.global_rank, len(self.engine.units)
        for stage, turns, start in ((0, self._forward_turns, 0), (2, self._backward_turns, count)):
            for unit, turn in turns.items():
                if not math.isfinite(values[start + unit]):
                    yield _Finding(stage, turn, rank, self.engine.units[unit].name, values[start + unit])
        for stage, value in ((1, values[-2]), (3, values[-1])):
            if not math.isfinite(value):
                yield _Finding(stage, 0, rank, "", value)

    def _explain(self, step: int, finding: _Finding) -> str:
        weights, gradients = (self._parameters(flat) for flat in (lambda g: g.data, lambda g: g.grad))
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
        for what, names in (("Weights", 1), ("Gradients", 2)):
            found = list(dict.fromkeys(name for item in everyone for name in item[names]))
            if found:
                inside = [n for n in found if first.unit and any(n.startswith(m + ".") for m in first.unit.split("+"))]
                text += f" {what} that are not finite: {', '.join((inside or found)[:3])}{' ...' if len(found) > 3 else ''}."
        return f"{text} This step has changed no weight."

    def _parameters(self, flat: Callable[[FlatGroup], Tensor | None]) -> list[str]:
        found = []
        for group in self.engine.groups:
            values = flat(group)
            for entry, start, span in self.engine.gradients.owned_spans(group) if values is not None else ():
                if not torch.isfinite(values[start : start + span.stop - span.start]).all():
                    found.append(entry.name)
        return found


def _mark(mark: Tensor, tensor: Tensor) -> None:
    """Raise ``mark`` [] to the largest magnitude in ``tensor``; nan wins."""
    if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
        with torch.no_grad():
            torch.maximum(mark, torch.linalg.vector_norm(tensor.detach(), math.inf), out=mark)
