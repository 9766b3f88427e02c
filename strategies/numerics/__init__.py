"""Precision plugins, and where the first nan or inf of a step came from."""
