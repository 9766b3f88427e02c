"""Optimizers that look at whole tensors (Muon, Adafactor, LAMB, ...): each parameter is stepped by
one rank, its owner.

Weights and gradients stay in shards. For the time of a step every rank has its own parameters
whole; the optimizer's state belongs to them, so that a rank keeps about 1/N of it. A step gathers
weights and gradients and scatters the new weights: 3 * (N - 1) / N elements on the wire for each
element of a parameter, and 2/N of them in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine import Zero3Engine
from ..engine.chunk import Chunk
from ..engine.unit import Exchange, Unit
from ..state_dicts.optimizer_state import clear_state
from .substituted_step import Substitution


class OwnedTensors(Substitution):
    """Lets an optimizer step on whole parameters.

    Args:
        engine: see :class:`~.substitution.Substitution`.
        index: see there.
        optimizer: see there.
        state: by parameter name, to begin with; what other ranks own is dropped.
    """

    mine: dict[str, nn.Parameter]  # by name, what this rank owns; without elements between steps

    def __init__(
        self,
        engine: Zero3Engine,
        index: int,
        optimizer: Optimizer,
        state: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(engine, index, optimizer)
        names = {name for names in engine.optimizer_names[index] for name in names}
        entries = [entry for unit in engine.units for entry in unit.entries if entry.name in names]
        owners = balance(
            {entry.name: entry.size.numel() for entry in entries}, engine.collectives.world_size
        )
        self._names = names
        self.mine = {
            entry.name: nn.Parameter(torch.empty(0, dtype=entry.dtype, device=engine.device))
            for entry in entries
            if owners[entry.name] == engine.collectives.rank
        }
        self.set_state(state or {})

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of what this rank owns, by parameter name."""
        return {
            name: self.optimizer.state[p]
            for name, p in self.mine.items()
            if p in self.optimizer.state
        }

    def set_state(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Replace the optimizer's state by this rank's part of a full one, by parameter name."""
        clear_state(self.optimizer)
        for name in self.mine.keys() & state.keys():
            self.optimizer.state[self.mine[name]] = {
                key: self._place(key, value) for key, value in state[name].items()
            }

    def _place(self, key: str, value: Any) -> Any:
        # As `Optimizer.load_state_dict` does it; no optimizer of torch that steps on whole tensors
        # keeps counts on the device.
        if not isinstance(value, Tensor):
            return value
        return value.clone() if key == "step" else value.clone().to(self.engine.device)

    def load(self) -> list[list[nn.Parameter]]:
        """See :meth:`Substitution.load`."""
        for unit in self._units():
            values, grads = unit.values(), unit.gradients()
            for entry in unit.entries:
                if entry.name in self.mine:
                    p = self.mine[entry.name]
                    # the user's own, which the optimizer may look for
                    vars(p).update(vars(entry.parameter))
                    p.data = values[entry.name].clone()
                    p.grad = (
                        grads[entry.name].clone()
                        if self.engine.gradients.has_gradient(entry)
                        else None
                    )
        return [
            [self.mine[n] for n in names if n in self.mine]
            for names in self.engine.optimizer_names[self.index]
        ]

    def store(self) -> None:
        """See :meth:`Substitution.store`."""
        for unit in self._units():
            for chunk in unit.chunks:
                if self._names.intersection(entry.name for entry in chunk.entries):
                    self._scatter(unit, chunk)
        for p in self.mine.values():
            p.data, p.grad = p.data.new_empty(0), None

    def _scatter(self, unit: Unit, chunk: Chunk) -> None:
        """The parameters that each rank owns, and zeros for the others, add up to the whole; of
        replicas the first counts.
        """
        collectives = self.engine.collectives
        counts = collectives.global_rank < collectives.world_size
        buffer = torch.zeros(
            chunk.layout.numel, dtype=chunk.master_dtype, device=self.engine.device
        )
        for entry, view in zip(chunk.entries, chunk.views(buffer), strict=True):
            if entry.name in self.mine and counts:
                view.copy_(self.mine[entry.name])
        total = collectives.reduce_scatter(buffer, unit.labels[Exchange.REDUCE]).wait()
        chunk.store_shard(
            total, lambda group: group.data if group.key.optimizer == self.index else None
        )

    def _units(self) -> Iterator[Unit]:
        return (
            unit
            for unit in self.engine.units
            if self._names.intersection(entry.name for entry in unit.entries)
        )


def balance(numels: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Owner of each parameter: the largest first, each to the rank that has least."""
    load = [0] * world_size
    owners = {}
    for name in sorted(numels, key=lambda name: (-numels[name], name)):
        owners[name] = load.index(min(load))
        load[owners[name]] += numels[name]
    return owners
