"""The order of a sampler without a length, which may have no end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from ..support.random_states import capture, restore, scoped

UNKNOWN = 1 << 62  # items of an order whose end has not been seen
_CHUNK = 1024  # items drawn at a time
_HEAD = 1 << 16  # items at the beginning that are kept


class UnsizedOrder:
    """Items of a sampler, drawn as far as they are asked for; those that were used are forgotten.

    The sampler may draw from the global generators. It finds them as it left them, and nobody else
    notices.

    Args:
        sampler: makes the sampler, inside the seeded generators.
        seed: of the generators when it begins.
        check: called with each chunk of items and the place of its first, to look for bad ones.
    """

    def __init__(
        self,
        sampler: Callable[[], Iterable[Any]],
        seed: int,
        check: Callable[[list[Any], int], None],
    ) -> None:
        self._check = check
        self._known: list[Any] = []  # items from place `_first` on
        self._first = 0
        self._head: list[Any] = []  # to which the end may wrap around
        self._used = 0  # items before this place will not be asked for again, but for the head
        self._ended = False
        with scoped(seed):
            # a generator, because some samplers begin again at each iter()
            self._items = (item for item in sampler())
            self._rng = capture()
        self._rng.pop("cuda", None)

    def __len__(self) -> int:
        """Items in all, `UNKNOWN` before the end was seen."""
        return self._first + len(self._known) if self._ended else UNKNOWN

    def reach(self, count: int) -> None:
        """Draw until ``count`` items are known, or the end is."""
        while not self._ended and self._first + len(self._known) < count:
            with scoped():
                restore(self._rng)
                chunk = list(islice(self._items, _CHUNK))
                self._rng = capture()
            self._rng.pop("cuda", None)
            self._check(chunk, self._first + len(self._known))
            self._ended = not chunk
            self._head += chunk[: _HEAD - len(self._head)]
            self._known += chunk
            if (used := min(self._used - self._first, len(self._known))) >= _CHUNK:
                del self._known[:used]
                self._first += used

    def forget(self, before: int) -> None:
        """Items before this place will not be asked for again, but for the first 65536."""
        self._used = before

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            self.reach(place.stop)
            return self._known[place.start - self._first : place.stop - self._first]
        return self._head[place] if place < self._first else self._known[place - self._first]
