"""Checkpoints: write, find, verify and read them."""

from ..state_dicts.collective_errors import CheckpointError, run_on_all_ranks
from .archive import ArchiveSave, Skeleton, export_checkpoint
from .options import CheckpointOptions
from .strategy import CheckpointStrategy

__all__ = [
    "ArchiveSave",
    "CheckpointError",
    "CheckpointOptions",
    "CheckpointStrategy",
    "Skeleton",
    "export_checkpoint",
    "run_on_all_ranks",
]
