"""What needs neither torch.distributed nor Lightning: pauses of the collector, stacks of threads,
random states.
"""

from .gc_pause import without_collection

__all__ = ["without_collection"]
