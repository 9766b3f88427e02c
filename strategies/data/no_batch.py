"""The stand-in for a batch on a rank that has no sample left while other ranks evaluate one."""

from __future__ import annotations

from typing import Any, NoReturn


class NoBatch:
    """Takes the place of a batch on a rank that has no sample in this evaluation step.

    The step does not run. Batch hooks of callbacks and of the module get this object as the batch
    and as the step's output.
    """

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"There is no batch to read {name!r} from: {_EXPLANATION}")

    def _refuse(self, *args: Any) -> NoReturn:
        raise TypeError(f"There is no batch to unpack, index or count: {_EXPLANATION}")

    __iter__ = __getitem__ = __len__ = __contains__ = __float__ = __int__ = _refuse

    def __bool__(self) -> bool:
        return False


_EXPLANATION = (
    "no sample is left for this rank in this evaluation step, which other ranks run. Batch hooks"
    " can test `isinstance(batch, lightning_zero3.strategies.data.NoBatch)`."
)
