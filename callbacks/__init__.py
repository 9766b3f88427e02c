"""Callbacks for memory and speed."""
