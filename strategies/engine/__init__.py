"""ZeRO-3 engine."""
