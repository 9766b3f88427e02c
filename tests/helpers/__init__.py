"""Shared by the tests; imported as `helpers` (pyproject.toml puts tests/ on pytest's path)."""
