"""Precision plugins for shards; the place where the first nan or inf of a step came from."""
