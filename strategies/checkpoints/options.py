"""The user's choices about checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckpointOptions:
    """How checkpoints are written and read.

    Args:
        kind: "sharded" writes a directory in torch's distributed format, every rank its own part;
            "full" writes one file that any strategy reads. Loading reads both kinds, whichever is
            chosen here.
        background: copy this rank's shards to CPU memory and go on training while a thread writes
            the copy. There is never more than one copy: a save waits for the save before. A save
            that fails is an error on all ranks when the next step begins, or at the end of
            training. For "sharded" only.
        weights_only: loading rebuilds tensors and plain values only. With False it runs whatever
            code the checkpoint names: for hyperparameters or callback states of other classes, from
            a source that you trust.
    """

    kind: Literal["sharded", "full"] = "sharded"
    background: bool = False
    weights_only: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("sharded", "full"):
            raise ValueError(f"CheckpointOptions(kind={self.kind!r}): choose 'sharded' or 'full'.")
        if self.background and self.kind == "full":
            raise ValueError(
                "CheckpointOptions(background=True) writes sharded checkpoints only: leave out"
                " kind='full'."
            )
