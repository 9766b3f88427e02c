"""Resumable sharded data loading."""
