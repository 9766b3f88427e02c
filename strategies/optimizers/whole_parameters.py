"""Let optimizers that look at whole tensors (Muon, Adafactor, LAMB, ...) step on whole parameters.

Each parameter is stepped by one rank, its owner. Weights and gradients stay in shards; for the time
of a step every rank has the parameters that it owns whole. The optimizer's state belongs to these,
so that a rank keeps about 1/N of it. A step gathers weights and gradients and scatters the new
weights: 3 * (N - 1) / N elements on the wire for each element of a parameter, and 2/N of them in
memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine import Entry, Exchange, StandIns, State, Unit, Zero3Engine


class WholeParameters(StandIns):
    """Lets an optimizer step on whole parameters.

    Args:
        engine: holds the shards.
        optimizer: one of its optimizers.
    """

    # The parameters that this rank owns, by name; they have no elements between steps.
    owned: dict[str, nn.Parameter]

    def __init__(self, engine: Zero3Engine, optimizer: Optimizer) -> None:
        super().__init__(engine)
        self._loads = [0] * engine.collectives.world_size  # elements that each rank owns
        self._owners: dict[str, int] = {}
        self.owned = {}
        self._assign(chain(*engine.steps[optimizer].entries()))

    def _assign(self, entries: Iterable[Entry]) -> None:
        """Give those of ``entries`` an owner that have none: at first, or as one has come from
        another optimizer.
        """
        new = {entry.name: entry for entry in entries if entry.name not in self._owners}
        numels = {name: entry.size.numel() for name, entry in new.items()}
        self._owners |= assign_owners(numels, self._loads)
        for name, entry in new.items():
            if self._owners[name] == self.engine.collectives.rank:
                self.owned[name] = nn.Parameter(
                    torch.empty(0, dtype=entry.dtype, device=entry.shard.device)
                )

    def of(self, groups: Sequence[Sequence[Entry]]) -> list[list[nn.Parameter]]:
        """See :meth:`StandIns.of`."""
        return [[self.owned[e.name] for e in entries if e.name in self.owned] for entries in groups]

    def load(self, groups: Sequence[Sequence[Entry]]) -> None:
        """See :meth:`StandIns.load`."""
        self._assign(chain(*groups))
        for unit, its in self._by_unit(groups).items():
            values, grads = unit.values(), unit.gradients()
            for entry in its:
                if (p := self.owned.get(entry.name)) is not None:
                    # attributes of the user's own, which the optimizer may look for
                    vars(p).update(vars(entry.parameter))
                    del p.zero3_entry  # type: ignore[attr-defined]  # the module's parameter is sharded
                    p.data = values[entry.name].to(p.device, copy=True)
                    has_gradient = self.engine.gradients.has_gradient(entry)
                    grad = grads[entry.name]
                    p.grad = grad.to(p.device, copy=True) if has_gradient else None

    def store(self, groups: Sequence[Sequence[Entry]]) -> None:
        """See :meth:`StandIns.store`.

        Reduce-scatters the parameters that each rank owns, with zeros in place of the others. Only
        the first of several replicas sends its parameters, as the sum is over the replicas, too.
        """
        collectives = self.engine.collectives
        is_first_replica = collectives.global_rank < collectives.world_size
        for unit, its in self._by_unit(groups).items():
            for chunk in (chunk for chunk in unit.chunks if chunk.trained):
                buffer = torch.zeros(
                    chunk.layout.numel, dtype=chunk.master_dtype, device=chunk.device
                )
                for entry, view in zip(chunk.entries, chunk.views(buffer), strict=True):
                    if entry in its and entry.name in self.owned and is_first_replica:
                        view.copy_(self.owned[entry.name])
                total = collectives.reduce_scatter(buffer, unit.labels[Exchange.REDUCE]).wait()
                for entry in its.intersection(chunk.entries):
                    entry.part_of(chunk.values).copy_(entry.part_of(total))
        self._clear_gradients([*chain(*groups)])
        self.drop()

    def _clear_gradients(self, entries: Sequence[Entry]) -> None:
        """Drop gradients that the optimizer has cleared; collective."""
        gradients, here = self.engine.gradients, self.owned
        cleared = [
            gradients.has_gradient(e) and e.name in here and here[e.name].grad is None
            for e in entries
        ]
        agreed = self.engine.collectives.agree(torch.tensor(cleared, device="cpu").long())
        for entry, is_cleared in zip(entries, agreed.tolist(), strict=True):
            if is_cleared:
                gradients.clear(entry)

    def drop(self) -> None:
        """See :meth:`StandIns.drop`."""
        for p in self.owned.values():
            p.data, p.grad = p.data.new_empty(0), None

    def _by_unit(self, groups: Sequence[Sequence[Entry]]) -> dict[Unit, set[Entry]]:
        found: dict[Unit, set[Entry]] = defaultdict(set)
        for entry in chain(*groups):
            found[entry.unit].add(entry)
        return found

    # ---------------------------------------------------------------------------------------- state

    def named(self, state: Mapping[Any, State], names: Iterable[str]) -> dict[str, State]:
        """The state of those parameters with these ``names`` that this rank owns, by name."""
        owned = {name: self.owned[name] for name in names if name in self.owned}
        return {name: state[p] for name, p in owned.items() if state.get(p)}

    def names_with_state(self, state: Mapping[Any, State]) -> set[str]:
        """See :meth:`StandIns.names_with_state`."""
        mine = set(self.named(state, self.owned))
        return set().union(*self.engine.collectives.all_gather_object(mine))

    def whole_state(self, entry: Entry, state: Mapping[Any, State]) -> State:
        """See :meth:`StandIns.whole_state`."""
        mine = state.get(self.owned[entry.name], {}) if entry.name in self.owned else {}
        # tensors by their shapes and dtypes, which are sent after
        kinds = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in mine.items()}
        owner, collectives = self._owners[entry.name], self.engine.collectives
        found = {}
        for key, kind in collectives.all_gather_object(kinds)[owner].items():
            found[key] = kind
            if isinstance(kind, Tensor):
                value = mine.get(key, torch.empty_like(kind, device="cpu"))
                found[key] = collectives.broadcast(
                    value.to(self.engine.device).contiguous().clone(), owner
                )
        return found

    def cut_state(self, entry: Entry, whole: State, state: dict[Any, State]) -> None:
        """See :meth:`StandIns.cut_state`."""
        self._assign([entry])
        if entry.name in self.owned:
            p = self.owned[entry.name]
            # As `Optimizer._process_value_according_to_param_policy` of torch does it; no optimizer
            # of torch that steps on whole tensors keeps counts on the device.
            state[p] = {
                key: value.to("cpu" if key == "step" else p.device, copy=True)
                if isinstance(value, Tensor)
                else value
                for key, value in whole.items()
            }


def assign_owners(numels: Mapping[str, int], loads: list[int]) -> dict[str, int]:
    """Assign an owner to each parameter: the largest first, each to the rank with least elements.

    Args:
        numels: number of elements of each parameter, by name.
        loads: number of elements that each rank has, to which those that it gets are added.

    Returns:
        The rank that owns each parameter, by name.
    """
    owners = {}
    for name in sorted(numels, key=lambda name: (-numels[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += numels[name]
    return owners
