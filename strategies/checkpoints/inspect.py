"""``inspect``: what is in a checkpoint, without the model's class."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DESCRIPTION = "print names, shapes, dtypes and progress of a checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("path", type=Path, help="the checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Print; returns the exit code."""
    print("\n".join(describe_file(arguments.path)))
    return 0


def describe_file(path: Path) -> Iterator[str]:
    """Lines about a full checkpoint; its tensors are mapped, not read."""
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    yield f"{path}: full checkpoint, {path.stat().st_size:,} bytes"
    yield f"epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}"
    for name, value in _tensors({key: checkpoint[key] for key in ("state_dict", "optimizer_states") if key in checkpoint}):
        yield f"  {name}  {tuple(value.shape)}  {str(value.dtype).removeprefix('torch.')}"


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            yield from _tensors(item, f"{name}.{key}" if name else str(key))
