"""What a training step logs, to be logged again with the values of each replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor


@dataclass
class Logged:
    """One call of ``self.log``."""

    name: str
    value: Any  # a tensor has a copy in the graph's own memory
    options: dict[str, Any]


class LogTape:
    """Calls of ``self.log`` (and ``self.log_dict``) in a training step, in their order.

    Logged inside of a capture, a value would be added to the sums of Lightning only once, and a replay would add to what the
    sums were then: the mean of the epoch would be wrong. So calls are recorded instead, and made after each replay.
    """

    def __init__(self) -> None:
        self.calls: list[Logged] = []

    @contextmanager
    def record(self, module: LightningModule) -> Iterator[None]:
        """Inside, ``module.log`` only records."""
        own = module.__dict__.get("log")
        module.log = self._log
        try:
            yield
        finally:
            del module.log
            if own is not None:
                module.log = own

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options.update(zip(_POSITIONAL, args, strict=False))
        # A copy, because the program may go on to change the tensor in place.
        self.calls.append(Logged(name, value.detach().clone() if isinstance(value, Tensor) else value, options))

    def play(self, module: LightningModule) -> None:
        """Log with the values that are in the graph's memory now."""
        for call in self.calls:
            value = call.value.clone() if isinstance(call.value, Tensor) else call.value
            module.log(call.name, value, **call.options)


# Parameters of `LightningModule.log` after name and value.
_POSITIONAL = list(LightningModule.log.__code__.co_varnames[3 : LightningModule.log.__code__.co_argcount])
