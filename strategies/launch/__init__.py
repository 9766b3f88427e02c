"""How processes find each other: launchers, checks before the start, rendezvous, signals."""
