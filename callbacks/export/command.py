"""The command ``export``: a program out of a checkpoint and the skeleton that its run has left."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from ...strategies.checkpoints import CheckpointError, Skeleton, export_checkpoint
from .onnx_graph import archive_of, write_graph

CHECK = "LIGHTNING_ZERO3_EXPORT_CHECK"  # set for a script that is to check its model alone
DESCRIPTION = "write a checkpoint of a run with ModelExport as a program, without the model's class"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "checkpoint", type=Path, nargs="?", help="of any strategy, a file or sharded"
    )
    parser.add_argument(
        "out", type=Path, nargs="?", help="the file to write: .pt2, .pt (TorchScript), .onnx"
    )
    parser.add_argument(
        "--skeleton", type=Path, help="default: model.pt2.skeleton, or the like, in the same folder"
    )
    parser.add_argument(
        "--current",
        action="store_true",
        help="of a run with weight averaging, take the weights that it averages",
    )
    parser.add_argument(
        "--check",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="run a script that trains with ModelExport, up to the check of the model",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the program and print its size, or check a script's; return the exit code."""
    if arguments.check:
        environment = {**os.environ, CHECK: "1"}
        return subprocess.run([sys.executable, *arguments.check], env=environment).returncode
    if arguments.out is None:
        raise CheckpointError("export: give a checkpoint and the file to write, or --check SCRIPT.")
    out: Path = arguments.out
    skeleton = arguments.skeleton or arguments.checkpoint.with_name(f"model{out.suffix}.skeleton")
    if not skeleton.is_file():
        raise CheckpointError(
            f"export: {skeleton} is not there: a run with ModelExport leaves one beside its"
            " checkpoints. Name it by --skeleton, or train with the callback."
        )
    suffix = Path(skeleton.stem).suffix
    if skeleton.suffix == ".skeleton" and suffix != out.suffix:
        raise CheckpointError(
            f"export: {skeleton} is of a {suffix} file, and {out} is to be another. Name the file"
            f" to write *{suffix}, or another skeleton."
        )
    archive = archive_of(out)
    export_checkpoint(arguments.checkpoint, Skeleton.read(skeleton), archive, not arguments.current)
    if out.suffix == ".onnx":
        write_graph(out)
    print(f"{archive}: {archive.stat().st_size:,} bytes")
    return 0
