"""Weights of a unit in use that hold full-precision values, where autocast, for which its slot is
filled, is off.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..residency.apart import apart
from ..residency.resting import set_data
from .shards import Entry


class Lifted:
    """Those of one unit.

    Args:
        gather: name -> full-precision value of each parameter of the unit, in memory of its own;
            collective.
    """

    def __init__(self, gather: Callable[[], dict[str, Tensor]]) -> None:
        self._gather, self._gathered = gather, dict[str, Tensor]()
        self.places: dict[Entry, Tensor] = {}  # in the slot

    def add(self, entries: list[Entry]) -> None:
        """Until this use ends ``entries`` hold their full-precision values, in memory of their own;
        collective.
        """
        self._gathered = self._gathered or self._gather()
        with apart():  # a transform would wrap what the parameter is to hold, a mode fake it
            for entry in (entry for entry in entries if entry not in self.places):
                self.places[entry] = entry.parameter.detach()
                self._fill(entry)

    def renew(self) -> None:
        """The shards were written; collective if any are lifted."""
        self._gathered = self._gather() if self.places else {}
        for entry in self.places:
            self._fill(entry)

    def drop(self) -> None:
        """All view the slot again."""
        for entry in tuple(self.places):
            # without a name for it, which would be one more viewer
            set_data(entry.parameter, self.places.pop(entry))
        self._gathered = {}

    def _fill(self, entry: Entry) -> None:
        # A copy: what autograd saves of it must not keep the values of the whole unit alive.
        with apart():
            set_data(
                entry.parameter,
                self._gathered[entry.name].clone(memory_format=torch.preserve_format),
            )
