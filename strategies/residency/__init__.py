"""What may be done with a tensor whose values are elsewhere: right or loud. Plain torch, and nothing of the engine."""

from .home import ResidencyError, is_sharded

__all__ = ["ResidencyError", "is_sharded"]
