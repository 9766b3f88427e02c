"""The command ``inspect``: print what is in a checkpoint, without the model's class."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..state_dicts.collective_errors import CheckpointError, without_other_ranks
from ..support import printable
from . import manifest, single_file, zip_file
from .manifest import INDEX, MANIFEST, read_manifest
from .sharded import ShardedCheckpoint
from .storage import damage

DESCRIPTION = "print names, shapes, dtypes, progress and completeness of a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "path", type=Path, help="a checkpoint, file or sharded, or a folder of them"
    )


@without_other_ranks()
def run(arguments: argparse.Namespace) -> int:
    """Print the description; return 1 if the checkpoint is broken, else 0."""
    path: Path = arguments.path
    fault = damage(path)
    if path.is_dir() and not (path / INDEX).exists() and fault is None:
        lines = list(describe_parent(path))
    else:
        fault = fault or (manifest if path.is_dir() else zip_file).changed(path, 0, 1)
        lines = [f"{path}: {fault or 'complete'}"]
        if fault is None:
            lines += describe_folder(path) if path.is_dir() else describe_file(path)
    print("\n".join(map(printable, lines)))
    return int(fault is not None)


def describe_file(path: Path) -> Iterator[str]:
    """Yield lines about a complete single file, whose tensors are mapped, not read."""
    checkpoint = single_file.read(path, weights_only=True)
    yield f"single file, {path.stat().st_size:,} bytes"
    if "state_dict" not in checkpoint:
        yield "weights alone: no run goes on from it"
        yield from _describe_tensors(checkpoint)
        return
    yield f"epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}"
    yield from _describe_tensors(
        {key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}
    )


def describe_folder(path: Path) -> Iterator[str]:
    """Yield lines about a complete sharded checkpoint."""
    if about := read_manifest(path):
        written = time.gmtime((path / MANIFEST).stat().st_mtime)
        yield (
            f"epoch {about.get('epoch')}, step {about.get('global_step')}, written by"
            f" {about.get('world_size')} ranks on {time.strftime('%Y-%m-%d %H:%M:%S UTC', written)}"
        )
    else:
        yield "no manifest: another program wrote it"
    for file in sorted(path.iterdir()):
        yield f"  {file.name}  {file.stat().st_size:,} bytes"
    yield from _describe_tensors(ShardedCheckpoint(path).state)


def describe_parent(folder: Path) -> Iterator[str]:
    """Yield a line about each checkpoint in a folder, the newest last.

    Raises:
        CheckpointError: the folder has no checkpoint.
    """
    paths = sorted(folder.glob("*.ckpt"), key=lambda path: path.lstat().st_mtime)
    if not paths:
        raise CheckpointError(f"{folder} is no checkpoint and holds none.")
    for path in paths:
        yield f"{path.name}: {damage(path) or 'complete'}"


def _describe_tensors(state: Any) -> Iterator[str]:
    for name, value in _named_tensors(state):
        yield f"  {name}  {tuple(value.shape)}  {str(value.dtype).removeprefix('torch.')}"


def _named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from _named_tensors(item, f"{name}.{key}" if name else str(key))
