"""`LogTape` records what a training step logs, and logs it when the step is over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

# Names of the parameters of `LightningModule.log` after name and value.
_POSITIONAL = LightningModule.log.__code__.co_varnames[3 : LightningModule.log.__code__.co_argcount]


class LogTape:
    """The calls of ``self.log`` (and ``self.log_dict``) in a training step, in their order.

    Inside of a capture, ``self.log`` would add a value to Lightning's sums (`_ResultMetric`) only
    once, and each replay would add to the sums of that time: the mean of the epoch would be wrong.
    So the calls are recorded instead, and made after each replay.

    Attributes:
        calls: name, value and options of each call; tensors are copies, which a replay refills.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    @contextmanager
    def record(self, module: LightningModule) -> Iterator[None]:
        """Replace ``module.log`` in the body by a function that only records the call."""

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            # hazard: the program may change the tensor in place after the call; keep a copy.
            kept = value.detach().clone() if isinstance(value, Tensor) else value
            options.update(zip(_POSITIONAL, args, strict=False))
            self.calls.append((name, kept, options))

        attributes = vars(module)
        own = attributes.get("log")
        attributes["log"] = log
        try:
            yield
        finally:
            del attributes["log"]
            if own is not None:
                attributes["log"] = own

    def play(self, module: LightningModule) -> None:
        """Make the recorded calls with the values that the tensors have now."""
        # In 64 bits, sums that begin here have the default dtype of this context.
        with module.trainer.precision_plugin.train_step_context():
            for name, value, options in self.calls:
                module.log(name, value.clone() if isinstance(value, Tensor) else value, **options)

    def values(self) -> dict[str, Any]:
        """Return all logged values and options by a name for messages; tensors as copies."""
        found: dict[str, Any] = {}
        for number, (name, value, options) in enumerate(self.calls):
            where = f"`self.log({name!r}, ...)`, call {number} of the step,"
            found[where] = value.clone() if isinstance(value, Tensor) else value
            found[f"the options of {where}"] = repr(options)
        return found
