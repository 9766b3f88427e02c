"""The command ``export``: a program out of a checkpoint and the skeleton that its run has left."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ...strategies.checkpoints import CheckpointError, Skeleton, export_checkpoint
from .onnx_graph import archive_of, write_graph

# Set for a script that is to check its model alone: the file for the error, or nothing.
CHECK = "LIGHTNING_ZERO3_EXPORT_CHECK"
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
    try:
        return _check(arguments.check) if arguments.check else _export(arguments)
    except CheckpointError as error:
        print(error, file=sys.stderr)  # has two lines
        return 1


def _export(arguments: argparse.Namespace) -> int:
    if arguments.out is None:
        raise CheckpointError(
            "export: no file is to be written.\nGive a checkpoint and the file, or --check SCRIPT."
        )
    out: Path = arguments.out
    skeleton = arguments.skeleton or arguments.checkpoint.with_name(f"model{out.suffix}.skeleton")
    if not skeleton.is_file():
        raise CheckpointError(
            f"export: {skeleton} is not there: a run with ModelExport leaves one beside its"
            " checkpoints.\nName it by --skeleton, or train with the callback."
        )
    suffix = Path(skeleton.stem).suffix
    if skeleton.suffix == ".skeleton" and suffix != out.suffix:
        raise CheckpointError(
            f"export: {skeleton} is of a {suffix} file, and {out} is to be another.\nName the file"
            f" to write *{suffix}, or another skeleton."
        )
    archive = archive_of(out)
    program = Skeleton.read(skeleton)
    try:
        export_checkpoint(arguments.checkpoint, {archive: program}, not arguments.current)
        if out.suffix == ".onnx":
            write_graph(out)
    except OSError as error:
        raise CheckpointError(
            f"export: {out} cannot be written: {error}\nWhat was there before is still there."
        ) from error
    print(f"{archive}: {archive.stat().st_size:,} bytes")
    return 0


def _check(command: list[str]) -> int:
    """Run a script, which ends where its model is checked; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        run = subprocess.run(
            [sys.executable, *command],
            env={**os.environ, CHECK: str(report)},
            stderr=subprocess.PIPE,  # it ends by an exception
            text=True,
        )
        if not report.exists():
            raise CheckpointError(
                f"export: {command[0]} has checked no model (exit code {run.returncode}).\nIt must"
                f" train with ModelExport.\n{run.stderr}"
            )
        error = report.read_text()
    if error:
        raise CheckpointError(error)
    print("ModelExport: the model can be exported")
    return 0
