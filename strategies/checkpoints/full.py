"""One file with everything, as Lightning's other strategies write and read it."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from .errors import together


def load(path: Path, weights_only: bool) -> dict[str, Any]:
    """Open a full checkpoint; its tensors are mapped into memory and read where they are used; collective.

    Raises:
        CheckpointError: on all ranks, if it cannot be read.
    """
    found: dict[str, Any] = {}
    together(f"Loading {path}", lambda: found.update(_open(path, weights_only)))
    return found


def _open(path: Path, weights_only: bool) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=weights_only)
