"""The command ``consolidate``: make one file out of a sharded checkpoint.

It needs the memory of one tensor, and no model class.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import Tensor

from ..state_dicts.collective_errors import without_other_ranks
from ..state_dicts.gather import tensors_in
from ..state_dicts.optimizer_state import number_parameters
from ..state_dicts.slices import SavedTensor
from .full import finish, reserve
from .sharded import ShardedCheckpoint
from .storage import begin, commit, make_folder
from .weights import SafetensorsWriter

DESCRIPTION = "write a sharded checkpoint as one file that any strategy and torch.load read"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folder", type=Path, help="the sharded checkpoint, of zero3 or of FSDP2")
    parser.add_argument("out", type=Path, help="the file to write; with --safetensors a folder")
    parser.add_argument(
        "--safetensors",
        action="store_true",
        help="write the weights alone, as safetensors files with an index",
    )
    parser.add_argument(
        "--max-file-bytes",
        type=int,
        default=5 * 10**9,
        help="of a safetensors file (default: 5 GB)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file or folder and print sizes; return the exit code."""
    out: Path = arguments.out
    if arguments.safetensors:
        export(arguments.folder, out, arguments.max_file_bytes)
    else:
        consolidate(arguments.folder, out)
    for file in sorted(out.iterdir()) if out.is_dir() else [out]:
        print(f"{file}: {file.stat().st_size:,} bytes")
    return 0


@without_other_ranks()
def export(folder: Path, out: Path, max_file_bytes: int) -> None:
    """Write the weights in ``folder`` as safetensors files to the folder ``out``.

    ``out`` appears when it is complete.

    Raises:
        CheckpointError: the checkpoint is broken.
    """
    stage = make_folder(out)
    writer = SafetensorsWriter(stage, max_file_bytes)
    for key, value in ShardedCheckpoint(folder).checkpoint()["state_dict"].items():
        if isinstance(value, Tensor):
            writer.add(key, value)
    writer.finish()
    commit(stage, out)


@without_other_ranks()
def consolidate(folder: Path, out: Path) -> None:
    """Write the checkpoint in ``folder`` to the file ``out``, which appears when it is complete.

    Raises:
        CheckpointError: the checkpoint is broken.
    """
    source = ShardedCheckpoint(folder)
    checkpoint = source.checkpoint()
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [
            number_parameters(state) for state in checkpoint["optimizer_states"]
        ]
    stage = begin(out)
    places = reserve(checkpoint, stage)
    saved = {id(tensor): tensor for tensor in tensors_in(checkpoint, SavedTensor)}
    source.read((saved[key], place) for key, place in places.items())
    places.clear()  # unmap the file
    finish(stage, out)
