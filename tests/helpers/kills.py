"""A process that dies at a chosen file operation."""

import os


class Died(BaseException):
    """What a kill looks like from inside."""


def kill_at(monkeypatch, number):
    """Die instead of doing the file operation with this number; return what counts them."""
    calls = []

    def dying(operation):
        def call(*args, **kwargs):
            calls.append(operation.__name__)
            if len(calls) == number:
                raise Died
            return operation(*args, **kwargs)

        return call

    for name in ("rename", "replace", "fsync", "rmdir", "unlink"):
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    return calls
