"""`CUDAGraphStep`: the training step, captured and replayed as CUDA graphs."""
