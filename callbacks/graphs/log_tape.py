"""`LogTape` records what a training step logs, and logs it again with the values of a replay."""

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
    """One call of ``self.log``.

    Attributes:
        name: the logged name.
        value: the logged value; in a recorded call, a copy in the graph's own memory.
        options: the other arguments, by name.
        place: file and line of the call.
    """

    name: str
    value: Any
    options: dict[str, Any]
    place: tuple[str, int] | None


class LogTape:
    """The calls of ``self.log`` (and ``self.log_dict``) in a training step, in their order.

    Inside of a capture, ``self.log`` would add a value to Lightning's sums (`_ResultMetric`) only
    once, and each replay would add to the sums of that time: the mean of the epoch would be wrong.
    So the calls are recorded instead, and made after each replay.
    """

    def __init__(self) -> None:
        self.calls: list[Logged] = []

    def record(self, module: LightningModule) -> AbstractContextManager[None]:
        """Replace ``module.log`` in the body by a function that only records the call."""

        def log(name: str, value: Any, options: dict[str, Any]) -> None:
            # hazard: the program may change the tensor in place after the call; keep a copy.
            kept = value.detach().clone() if isinstance(value, Tensor) else value
            self.calls.append(Logged(name, kept, options, user_line()))

        return _replaced(module, log)

    def listen(
        self, module: LightningModule, forward: Callable[..., None]
    ) -> AbstractContextManager[None]:
        """Replace ``module.log`` in the body by a function that records, then calls ``forward``.

        Args:
            module: the module that logs.
            forward: gets the real ``log``, and the name, the value and the options of the call.
        """
        real = module.log

        def log(name: str, value: Any, options: dict[str, Any]) -> None:
            # Detached, so that the tape does not keep the autograd graph alive.
            kept = value.detach() if isinstance(value, Tensor) else value
            self.calls.append(Logged(name, kept, options, user_line()))
            forward(real, name, value, options)

        return _replaced(module, log)

    def play(self, module: LightningModule) -> None:
        """Make the recorded calls with the values that are in the graph's memory now."""
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


# Names of the parameters of `LightningModule.log` after name and value.
_POSITIONAL = list(
    LightningModule.log.__code__.co_varnames[3 : LightningModule.log.__code__.co_argcount]
)
