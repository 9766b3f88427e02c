"""`CUDAMemoryTracker`: measures where the memory of a device goes, and who took it."""
