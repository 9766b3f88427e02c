"""Whether all ranks are alive and at the same place: heartbeats, and the watchdog that names the
one that is not.
"""

from .position import Activity

__all__ = ["Activity"]
