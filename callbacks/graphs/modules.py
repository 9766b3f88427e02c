"""`CapturedModule`: a single module as graphs, for models whose step is not captured as a whole."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...strategies.support import NO_GRAPH_TASK, graph_task
from .program import Program, Record, signature


def find_modules(root: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    """Return the outermost modules whose names match one of ``patterns`` (``fnmatch``), by name.

    Raises:
        ValueError: a pattern matches no module.
    """
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {n: m for n, m in root.named_modules() if n and fnmatchcase(n, pattern)}
        if not matching:
            raise ValueError(
                f"CUDAGraphStep(modules=[{pattern!r}]) matches no module of {type(root).__name__}."
            )
        found.update(matching)
    return {n: m for n, m in found.items() if not any(n.startswith(f"{other}.") for other in found)}


class CapturedModule(Program):
    """Replaces the ``forward`` of a module.

    Each rank decides by its own inputs which signatures it captures, and when: modules exchange
    nothing inside, and ranks may run them different numbers of times.
    """

    has_own_pool = True

    def decide(self, inputs: Any) -> Record | None:
        """See :meth:`Program.decide`."""
        if graph_task() != NO_GRAPH_TASK:  # a backward runs it
            self.problems.append(
                "a checkpoint runs it, and again in the backward. Put the checkpoint inside of the"
                " module."
            )
        if changes := self.changes():
            self.recapture(changes)
        device = self.fit.device
        is_on, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
        key = signature(inputs, device), is_on(device.type), dtype(device.type)
        known = self.records.get(key, Record()).graphs
        if known is not None and known.is_busy:
            return None  # it runs twice before a backward
        record = self.choose(key)
        if record is not None and not (any(record.given) or record.problems):
            record.is_replay = False  # the backward of the last run may be still to come
        self.is_eager |= bool(self.problems)  # the other ranks follow before the next batch
        return None if self.is_eager else record

    def _look(self, inputs: Any) -> dict[str, Any]:
        """Return what a replay leaves as it is, by what changes it."""
        group: Any = dist.group.WORLD if dist.is_initialized() else None
        # Ranks need not capture a module at the same time.
        exchanges = group and group._get_sequence_number_for_group()
        return super()._look(inputs) | {"exchanges something with other ranks": exchanges}
