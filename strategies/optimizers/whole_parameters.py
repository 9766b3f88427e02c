"""Let optimizers that look at whole tensors (Muon, Adafactor, LAMB, ...) step on whole parameters.

Each parameter is stepped by one rank, its owner. Weights and gradients stay in shards; for the time
of a step every rank has the parameters that it owns whole. The optimizer's state belongs to these,
so that a rank keeps about 1/N of it. A step gathers weights and gradients and scatters the new
weights: 3 * (N - 1) / N elements on the wire for each element of a parameter, and 2/N of them in
memory.
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
        engine: see :class:`~.substituted_step.Substitution`.
        index: see there.
        optimizer: see there.
        state: the optimizer's first state, by parameter name; the state of parameters that other
            ranks own is dropped.
    """

    # The parameters that this rank owns, by name; they have no elements between steps.
    owned_parameters: dict[str, nn.Parameter]

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
        owners = assign_owners(
            {entry.name: entry.size.numel() for entry in entries}, engine.collectives.world_size
        )
        self._names = names
        self.owned_parameters = {
            entry.name: nn.Parameter(torch.empty(0, dtype=entry.dtype, device=engine.device))
            for entry in entries
            if owners[entry.name] == engine.collectives.rank
        }
        self.set_state(state or {})

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of the parameters that this rank owns, by name."""
        return {
            name: self.optimizer.state[p]
            for name, p in self.owned_parameters.items()
            if p in self.optimizer.state
        }

    def set_state(self, state: Mapping[str, dict[str, Any]]) -> None:
        """Replace the optimizer's state by this rank's part of a full one, by parameter name."""
        clear_state(self.optimizer)
        for name in self.owned_parameters.keys() & state.keys():
            self.optimizer.state[self.owned_parameters[name]] = {
                key: self._place_value(key, value) for key, value in state[name].items()
            }

    def _place_value(self, key: str, value: Any) -> Any:
        # As `Optimizer._process_value_according_to_param_policy` of torch does it; no optimizer of
        # torch that steps on whole tensors keeps counts on the device.
        if not isinstance(value, Tensor):
            return value
        return value.clone() if key == "step" else value.clone().to(self.engine.device)

    def load_tensors(self) -> list[list[nn.Parameter]]:
        """See :meth:`Substitution.load_tensors`."""
        for unit in self._own_units():
            values, grads = unit.values(), unit.gradients()
            for entry in unit.entries:
                if entry.name in self.owned_parameters:
                    p = self.owned_parameters[entry.name]
                    # attributes of the user's own, which the optimizer may look for
                    vars(p).update(vars(entry.parameter))
                    p.data = values[entry.name].clone()
                    p.grad = (
                        grads[entry.name].clone()
                        if self.engine.gradients.has_gradient(entry)
                        else None
                    )
        return [
            [self.owned_parameters[n] for n in names if n in self.owned_parameters]
            for names in self.engine.optimizer_names[self.index]
        ]

    def store_tensors(self) -> None:
        """See :meth:`Substitution.store_tensors`."""
        for unit in self._own_units():
            for chunk in unit.chunks:
                if self._names.intersection(entry.name for entry in chunk.entries):
                    self._scatter_chunk(unit, chunk)
        for p in self.owned_parameters.values():
            p.data, p.grad = p.data.new_empty(0), None

    def _scatter_chunk(self, unit: Unit, chunk: Chunk) -> None:
        """Reduce-scatter the parameters that each rank owns, with zeros in place of the others.

        Only the first of several replicas sends its parameters; the others send zeros, as the sum
        is over the replicas, too.
        """
        collectives = self.engine.collectives
        is_first_replica = collectives.global_rank < collectives.world_size
        buffer = torch.zeros(
            chunk.layout.numel, dtype=chunk.master_dtype, device=self.engine.device
        )
        for entry, view in zip(chunk.entries, chunk.views(buffer), strict=True):
            if entry.name in self.owned_parameters and is_first_replica:
                view.copy_(self.owned_parameters[entry.name])
        total = collectives.reduce_scatter(buffer, unit.labels[Exchange.REDUCE]).wait()
        chunk.store_shard(
            total, lambda group: group.data if group.key.optimizer == self.index else None
        )

    def _own_units(self) -> Iterator[Unit]:
        for unit in self.engine.units:
            if self._names.intersection(entry.name for entry in unit.entries):
                yield unit


def assign_owners(numels: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Assign an owner to each parameter: the largest first, each to the rank with least elements.

    Args:
        numels: number of elements of each parameter, by name.
        world_size: number of ranks.

    Returns:
        The rank that owns each parameter, by name.
    """
    numels_of_ranks = [0] * world_size
    owners = {}
    for name in sorted(numels, key=lambda name: (-numels[name], name)):
        owners[name] = numels_of_ranks.index(min(numels_of_ranks))
        numels_of_ranks[owners[name]] += numels[name]
    return owners
