"""Finds ranks that died, hang or are slow: heartbeats, and the watchdog that names such a rank."""

from .position import Activity

__all__ = ["Activity"]
