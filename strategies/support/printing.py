"""Text of others on a terminal."""

from __future__ import annotations


def printable(text: str, kept: str = "") -> str:
    r"""Escape what does not print, as in ``"\n"``, but for the characters in ``kept``.

    A name in a file, or a message of another process, could move the cursor, or end the line and
    begin one that looks like ours.
    """
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text
    )
