"""`LogTape` records what a program logs, and logs it when the program is over."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from .software_graph import replaced

# Names of the parameters of `LightningModule.log` after name and value.
_POSITIONAL = LightningModule.log.__code__.co_varnames[3 : LightningModule.log.__code__.co_argcount]


class LogTape:
    """The calls of ``self.log`` (and ``self.log_dict``) in a program, in their order.

    Inside of a capture, ``self.log`` would add a value to Lightning's sums (`_ResultMetric`) only
    once, and each replay would add to the sums of that time: the mean of the epoch would be wrong.
    So the calls are recorded instead, and made after each replay.

    Args:
        module: the module that logs.

    Attributes:
        module: that module.
        calls: name, value and options of each call; tensors are copies, which a replay refills.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        # hazard: the program may change the tensor in place after the call; keep a copy.
        kept = value.detach().clone() if isinstance(value, Tensor) else value
        options.update(zip(_POSITIONAL, args, strict=False))
        self.calls.append((name, kept, options))

    def record(self) -> AbstractContextManager[None]:
        """Replace ``module.log`` in the body by a function that only records the call."""
        return replaced(vars(self.module), {"log": self._log})

    def play(self) -> None:
        """Make the recorded calls with the values that the tensors have now."""
        # In 64 bits, sums that begin here have the default dtype of this context.
        with self.module.trainer.precision_plugin.train_step_context():
            for name, value, options in self.calls:
                value = value.clone() if isinstance(value, Tensor) else value
                self.module.log(name, value, **options)

    def values(self) -> dict[str, Any]:
        """Return all logged values and options by a name for messages; tensors as copies."""
        found: dict[str, Any] = {}
        for number, (name, value, options) in enumerate(self.calls):
            where = f"`self.log({name!r}, ...)`, call {number} of the step,"
            found[where] = value.clone() if isinstance(value, Tensor) else value
            found[f"the options of {where}"] = repr(options)
        return found
