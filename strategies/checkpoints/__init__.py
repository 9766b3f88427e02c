"""Checkpoints: write, find, verify and read them."""

from .options import CheckpointOptions
from .strategy import CheckpointStrategy

__all__ = ["CheckpointOptions", "CheckpointStrategy"]
