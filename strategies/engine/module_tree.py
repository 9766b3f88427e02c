"""The module tree as it was sharded: parameters that come, go or are replaced later are refused by
name.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn


class Structure:
    """Remembers which objects a model consists of. A check compares identities only, and costs
    microseconds.
    """

    def __init__(self, model: nn.Module, changed: Callable[[], None]) -> None:
        """``changed`` is called when a check finds other modules, or names."""
        self.model, self._changed = model, changed
        self._look()

    def _look(self) -> None:
        # The parameters and the children of every module. Scripted modules have other tables, which
        # do not change.
        tables = [
            table
            for module in self.model.modules()
            for table in (module._parameters, module._modules)
        ]
        self._tables: list[dict[str, Any]] = [t for t in tables if isinstance(t, dict)]
        # while they live their ids are nobody else's
        self._held = list(chain.from_iterable(map(dict.values, self._tables)))
        self._seen, self._names = list(map(id, self._held)), self._find_names()

    def check(self) -> None:
        """Raise a ValueError if a parameter was added, replaced or removed."""
        # Without a Python loop: this runs in every step.
        if list(map(id, chain.from_iterable(map(dict.values, self._tables)))) == self._seen:
            return
        now = self._find_names()
        for key, name in (self._names | now).items():
            if (key in now) != (key in self._names):
                raise ValueError(
                    f"Parameter {name!r} was added, replaced or removed after the model was"
                    " sharded.\nChange modules in `__init__`, `configure_model` or `setup`. A copy"
                    " that each rank is to have whole (a teacher) may be in a list (`self.teacher ="
                    " [copy]`)."
                )
        # only names changed (pruning does that), or modules without parameters: nothing that is
        # sharded
        self._look()
        self._changed()

    def _find_names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.model.named_parameters(remove_duplicate=False)}
