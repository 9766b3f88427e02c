"""LBFGS on the module's own parameters: its long vectors are whole on every rank.

It reads gradients and writes weights as any code does between steps, collectively, and all ranks
compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..engine import Entry, StandIns, State


class Themselves(StandIns):
    """Lets LBFGS step on the parameters themselves.

    The optimizer gets the mean over ranks of a closure's loss: it compares losses, and stops by
    them.
    """

    needed_before_closure = True  # LBFGS looks for its history before it calls the closure

    def of(self, groups: Sequence[Sequence[Entry]]) -> list[list[nn.Parameter]]:
        """See :meth:`StandIns.of`."""
        return [[entry.parameter for entry in entries] for entries in groups]

    def load(self, groups: Sequence[Sequence[Entry]]) -> None:
        """See :meth:`StandIns.load`."""

    def store(self, groups: Sequence[Sequence[Entry]]) -> None:
        """See :meth:`StandIns.store`."""

    def whole_state(self, entry: Entry, state: dict[Any, State]) -> State:
        """See :meth:`StandIns.whole_state`."""
        return state.get(entry.parameter, {})

    def names_with_state(self, state: dict[Any, State]) -> set[str]:
        """See :meth:`StandIns.names_with_state`."""
        return {e.name for e in self.engine.entries.values() if state.get(e.parameter)}

    def cut_state(self, entry: Entry, whole: State, state: dict[Any, State]) -> None:
        """See :meth:`StandIns.cut_state`."""
        state[entry.parameter] = whole

    def convert_loss(self, value: Any) -> Any:
        """Return the mean of ``value`` over ranks; collective."""
        mine = torch.as_tensor(value, device=self.engine.device).detach()
        everyone = self.engine.collectives.all_gather_object(mine.item())
        return mine.new_tensor(sum(everyone) / len(everyone))
