"""`AllocatorConfig`: options of the CUDA allocator. Imports nothing: parts of it run before torch
is imported.
"""
