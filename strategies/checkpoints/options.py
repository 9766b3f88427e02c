"""The user's choices about checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class CheckpointOptions:
    """How checkpoints are written and read.

    Args:
        kind: "file" writes one file that any strategy and ``torch.load`` read, every rank its own
            part; "sharded" writes a directory in torch's distributed format, for FSDP2 and for file
            systems that let one process at a time write a file: on NFS choose "sharded". Loading
            reads both kinds, whichever is chosen here.
        background: copy this rank's shards to CPU memory, for which training waits, and go on while
            a thread writes the copy. There is never more than one copy: a save waits for the save
            before. A save that fails is an error on all ranks when the next one begins, or at the
            end of training.
        weights_only: loading rebuilds tensors and plain values only. With False it runs whatever
            code the checkpoint names: for hyperparameters or callback states of other classes, from
            a source that you trust.
        exclude_frozen: leave out parameters that needed no gradient in this run: adapters and heads
            alone are saved. To be loaded, on any strategy with `strict=False`, into a model that
            has the others; here their names and shapes must be the same.
    """

    kind: Literal["file", "sharded"] = "file"
    background: bool = False
    weights_only: bool = True
    exclude_frozen: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("file", "sharded"):
            raise ValueError(f"CheckpointOptions(kind={self.kind!r}): choose 'file' or 'sharded'.")
