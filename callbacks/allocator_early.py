"""Run `allocator/early.py` as ``python -m lightning_zero3.callbacks.allocator_early``."""

import sys

from .allocator.early import MARKER, ensure, main, prepare

__all__ = ["MARKER", "ensure", "main", "prepare"]

if __name__ == "__main__":
    main(sys.argv[1:])
