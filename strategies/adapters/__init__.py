"""Callbacks of Lightning that read or write weights, made to work on shards."""
