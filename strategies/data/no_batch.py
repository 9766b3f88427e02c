"""What a rank is handed when others evaluate a batch and no sample is left for it."""

from __future__ import annotations

from typing import NoReturn


class NoBatch:
    """In the place of a batch, on a rank for which there is none in this evaluation step.

    The step does not run. Batch hooks of callbacks and of the module see it as their batch and as
    the step's output.
    """

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"There is no batch to read {name!r} from: no sample is left for this rank in this"
            " evaluation step. Batch hooks find out with isinstance(batch,"
            " lightning_zero3.strategies.data.NoBatch)."
        )
