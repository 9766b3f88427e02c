"""What a training step logs, to be logged again with the values of each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from .source_lines import user_line


@dataclass
class Logged:
    """One call of ``self.log``."""

    name: str
    value: Any  # of a recorded call a copy in the graph's own memory
    options: dict[str, Any]
    place: tuple[str, int] | None  # file and line


class LogTape:
    """Calls of ``self.log`` (and ``self.log_dict``) in a training step, in their order.

    Logged inside of a capture, a value would be added to the sums of Lightning only once, and a
    replay would add to what the sums were then: the mean of the epoch would be wrong. So calls are
    recorded instead, and made after each replay.
    """

    def __init__(self) -> None:
        self.calls: list[Logged] = []

    def record(self, module: LightningModule) -> AbstractContextManager[None]:
        """Inside, ``module.log`` only records."""

        def log(name: str, value: Any, options: dict[str, Any]) -> None:
            # A copy, because the program may go on to change the tensor in place.
            kept = value.detach().clone() if isinstance(value, Tensor) else value
            self.calls.append(Logged(name, kept, options, user_line()))

        return _replaced(module, log)

    def listen(
        self, module: LightningModule, forward: Callable[..., None]
    ) -> AbstractContextManager[None]:
        """Inside, ``module.log`` notes the call and goes on to
        ``forward(the real log, name, value, options)``.
        """
        real = module.log

        def log(name: str, value: Any, options: dict[str, Any]) -> None:
            kept = value.detach() if isinstance(value, Tensor) else value  # not its history
            self.calls.append(Logged(name, kept, options, user_line()))
            forward(real, name, value, options)

        return _replaced(module, log)

    def play(self, module: LightningModule) -> None:
        """Log with the values that are in the graph's memory now."""
        for call in self.calls:
            value = call.value.clone() if isinstance(call.value, Tensor) else call.value
            module.log(call.name, value, **call.options)


@contextmanager
def _replaced(
    module: LightningModule, log: Callable[[str, Any, dict[str, Any]], None]
) -> Iterator[None]:
    def replacement(name: str, value: Any, *args: Any, **options: Any) -> None:
        log(name, value, {**dict(zip(_POSITIONAL, args, strict=False)), **options})

    own = module.__dict__.get("log")
    module.log = replacement
    try:
        yield
    finally:
        del module.log
        if own is not None:
            module.log = own


# Parameters of `LightningModule.log` after name and value.
_POSITIONAL = list(
    LightningModule.log.__code__.co_varnames[3 : LightningModule.log.__code__.co_argcount]
)
