"""Checkpoints: what is written, where, and how it is read again."""

from .optimizer_state import take_over_state
from .options import CheckpointOptions
from .strategy import CheckpointStrategy

__all__ = ["CheckpointOptions", "CheckpointStrategy", "take_over_state"]
