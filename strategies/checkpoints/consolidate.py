"""The command ``consolidate``: make one file, or safetensors files, out of a checkpoint.

It needs the memory of one tensor, and no model class.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from torch import Tensor

from ..state_dicts.collective_errors import CheckpointError, without_other_ranks
from .single_file import FileSave, number_states
from .storage import local
from .weights import MAX_FILE_BYTES, WeightsSave, open_checkpoint, open_weights, rename_keys

DESCRIPTION = "write a checkpoint as one file that any strategy reads, or as safetensors files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "checkpoint", type=local, help="a sharded checkpoint, of zero3 or of FSDP2, or a file"
    )
    parser.add_argument("out", type=local, help="the file to write; with --safetensors a folder")
    parser.add_argument(
        "--safetensors",
        action="store_true",
        help="write the weights alone, as safetensors files with an index",
    )
    parser.add_argument(
        "--max-file-bytes",
        type=int,
        default=MAX_FILE_BYTES,
        help="of a safetensors file (default: 5 GB)",
    )
    parser.add_argument(
        "--strip-prefix",
        default="",
        metavar="PREFIX",
        help='what safetensors lose at the beginning of their names: "model." for Hugging Face',
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file or folder and print sizes; return the exit code."""
    out: Path = arguments.out
    if arguments.safetensors:
        export(arguments.checkpoint, out, arguments.max_file_bytes, arguments.strip_prefix)
    else:
        consolidate(arguments.checkpoint, out)
    for file in sorted(out.iterdir()) if out.is_dir() else [out]:
        print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


@without_other_ranks()
def export(path: Path, out: Path, max_file_bytes: int, prefix: str = "") -> None:
    """Write the weights of a checkpoint as safetensors files to the folder ``out``.

    They appear when they are complete; other files in it stay. Keys lose the prefix.

    Raises:
        CheckpointError: the checkpoint is broken.
    """
    mapping = {f"^{re.escape(prefix)}": ""}
    state = rename_keys(open_weights(path, weights_only=True), mapping)
    for key, value in state.items():
        # a file of a few bytes may claim any size
        if type(value) is Tensor and value.nbytes > value.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: {key} of {value.nbytes:,} bytes repeats itself.")
    WeightsSave(state, out, max_file_bytes=max_file_bytes).write()


@without_other_ranks()
def consolidate(path: Path, out: Path) -> None:
    """Write a checkpoint to the file ``out``, which appears when it is complete.

    Raises:
        CheckpointError: the checkpoint is broken.
    """
    checkpoint = open_checkpoint(path)
    if path.is_dir():
        number_states(checkpoint)
    FileSave(checkpoint, out).write()
