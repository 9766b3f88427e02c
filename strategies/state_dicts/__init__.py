"""Values, gradients and optimizer state by name, as boxes of the original tensors; what checkpoints
store and load.
"""
