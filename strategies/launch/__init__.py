"""How processes find each other: detection of the launcher, checks before the start, rendezvous,
signals.
"""
