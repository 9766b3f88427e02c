"""Read what a pickle says without the classes and functions that it names."""

from __future__ import annotations

import pickle
from typing import Any


class StandIn:
    """Takes the place of an object of any class, or of what any function returns.

    Attributes:
        arguments: of the call, or a state that is no dict. A dict is the attributes.
    """

    arguments: tuple[Any, ...]

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__ = state if isinstance(state, dict) else {"arguments": state}


_Unpickler: Any = pickle._Unpickler


class StandInUnpickler(_Unpickler):
    """Reads a pickle without looking up a name: each gets a class of this reading alone.

    This is Python's own unpickler in Python, because the opcodes of the one in C cannot be changed.
    """

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in of the name."""
        return type(name, (StandIn,), {})
