"""Adapters of Lightning's callbacks that read or write weights, so that they work on shards."""
