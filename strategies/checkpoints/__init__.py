"""Checkpoints: what is written, where, and how it is read again."""

from .options import CheckpointOptions
from .strategy import CheckpointStrategy

__all__ = ["CheckpointOptions", "CheckpointStrategy"]
