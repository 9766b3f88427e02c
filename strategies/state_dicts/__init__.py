"""Values, gradients and optimizer state by name, as boxes of the original tensors.

Checkpoints store and load these.
"""
