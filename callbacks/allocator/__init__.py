"""`AllocatorConfig`: options of the CUDA allocator.

This file imports nothing, as parts of the folder run before torch is imported.
"""
