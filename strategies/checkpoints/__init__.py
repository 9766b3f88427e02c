"""Checkpoints: write, find, verify and read them."""

from ..state_dicts.collective_errors import CheckpointError, run_on_all_ranks
from .archive import WEIGHTS_CONFIG, ArchiveSave, Skeleton, export_checkpoint
from .options import CheckpointOptions
from .storage import begin, commit
from .strategy import CheckpointStrategy

__all__ = [
    "WEIGHTS_CONFIG",
    "ArchiveSave",
    "CheckpointError",
    "CheckpointOptions",
    "CheckpointStrategy",
    "Skeleton",
    "begin",
    "commit",
    "export_checkpoint",
    "run_on_all_ranks",
]
