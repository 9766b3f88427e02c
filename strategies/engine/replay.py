"""What the engine does in Python around a backward pass, for passes that run as a captured graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .engine import Zero3Engine


class ReplayedPass:
    """The books of a captured backward pass.

    A captured pass adds to the flat gradients, so they are zeroed before the first one of a window. The end of the pass,
    which shows the gradients to the optimizers, runs in :meth:`Zero3Engine.backward` as ever.
    """

    def __init__(self, engine: Zero3Engine) -> None:
        self._engine = engine
        self._used: list[int] | None = None  # numbers of the parameters that get a gradient

    def begin(self) -> None:
        """Inside of ``engine.backward()``, before the pass is captured or replayed."""
        self._engine._pass.begin(silent=True)
        self._engine.reducer.zero_untouched()
        for number in self._used or ():
            self._engine.gradients.used[number] = 1

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Around the capture: notes which parameters the pass has gradients for."""
        books = self._engine.gradients.used
        before = bytes(books)
        books[:] = bytes(len(books))
        yield
        self._used = [number for number, used in enumerate(books) if used]
        books[:] = bytes(a | b for a, b in zip(books, before, strict=True))
