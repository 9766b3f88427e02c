"""The order of a sampler without a length, which may have no end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from ..support.random_states import capture, restore, scoped

UNKNOWN = 1 << 62  # the length of an order whose end has not been seen
_CHUNK = 1024  # items drawn at a time
_HEAD = 1 << 16  # items at the beginning that are kept


class UnsizedOrder:
    """Items of a sampler without a length, drawn on demand; used items are dropped.

    The sampler may draw from the global generators. Before each chunk they are set to the states in
    which the sampler left them, and afterwards to the states of the rest of the program.

    Args:
        sampler: makes the sampler, while the global generators are seeded.
        seed: the seed of the global generators when the sampler begins.
        check: looks for bad items; gets each chunk and the place of its first item.
    """

    def __init__(
        self,
        sampler: Callable[[], Iterable[Any]],
        seed: int,
        check: Callable[[list[Any], int], None],
    ) -> None:
        self._check = check
        self._known_items: list[Any] = []  # items from place `_first_place` on
        self._first_place = 0
        self._head_items: list[Any] = []  # the end of the order may wrap around to these
        self._used_before = 0  # only the head is read again before this place
        self._has_ended = False
        with scoped(seed):
            # A generator expression, because some samplers begin again at each iter().
            self._iterator = (item for item in sampler())
            self._rng_states = capture()
        self._rng_states.pop("cuda", None)

    def __len__(self) -> int:
        """Count all items; `UNKNOWN` before the end was seen."""
        return self._first_place + len(self._known_items) if self._has_ended else UNKNOWN

    def draw_until(self, count: int) -> None:
        """Draw items until ``count`` items are known or the sampler has ended."""
        while not self._has_ended and self._first_place + len(self._known_items) < count:
            with scoped():
                restore(self._rng_states)
                chunk = list(islice(self._iterator, _CHUNK))
                self._rng_states = capture()
            self._rng_states.pop("cuda", None)
            self._check(chunk, self._first_place + len(self._known_items))
            self._has_ended = not chunk
            self._head_items += chunk[: _HEAD - len(self._head_items)]
            self._known_items += chunk
            used = min(self._used_before - self._first_place, len(self._known_items))
            if used >= _CHUNK:
                del self._known_items[:used]
                self._first_place += used

    def forget_before(self, place: int) -> None:
        """Allow the items before ``place`` to be dropped, except for the first 65536."""
        self._used_before = place

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            self.draw_until(place.stop)
            start, stop = place.start - self._first_place, place.stop - self._first_place
            return self._known_items[start:stop]
        if place < self._first_place:
            return self._head_items[place]
        return self._known_items[place - self._first_place]
