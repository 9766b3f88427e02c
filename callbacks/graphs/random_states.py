"""Random states that a step saves, and goes back to in its backward, as activation checkpointing
does.

What a checkpoint computes again in the backward draws the numbers of the forward again:
`torch.utils.checkpoint` saves the state of the default generator in the forward, sets it around the
second computation, and sets the state of before after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .source_lines import Place, user_line

# Places of a generator, besides the states that the forward saved, which are numbered.
HOME = -1  # where the pass has led it
LOST = -2  # in another state: one that was saved in a second computation, or is gone to once more


class RandomStates:
    """Follows the calls of ``get_rng_state`` and ``set_rng_state`` in an eager step.

    Args:
        source: `torch` or `torch.cuda`.

    Attributes:
        place: where the generator is.
        set_at: the user's line that set its state last.
        offsets: of the states that the forward saved, from where it began, in numbers of a CUDA
            generator's thread.
    """

    def __init__(self, source: ModuleType) -> None:
        self._source = source
        self._began = 0
        self.place = HOME
        self.set_at: Place = None

    def begin(self) -> None:
        """An eager forward begins."""
        self._began = _offset(self._source.get_rng_state())

    @contextmanager
    def following(
        self, forward: bool, on_save: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Around a forward, or around its backward; ``on_save`` is called after each state that is
        saved.
        """
        real_get, real_set = real = self._source.get_rng_state, self._source.set_rng_state
        if forward:
            self.offsets: list[int] = []
            self._saved: list[tuple[Tensor, int]] = []  # states and their places
            self._visited: set[int] = set()

        def save(*args: object) -> Tensor:
            with _disable_current_modes():
                state = self._save(lambda: real_get(*args))
                if forward:
                    self.offsets.append(_offset(state) - self._began)
            place = len(self._saved) if forward else HOME if self.place == HOME else LOST
            self._saved.append((state, place))
            on_save()
            return state

        def go(state: Tensor, *args: object) -> None:
            place = next((place for saved, place in self._saved if saved is state), LOST)
            self.place = LOST if place in self._visited else place
            self._visited |= {place} - {HOME}
            self.set_at = user_line()
            self._go(lambda: real_set(state, *args))

        self._source.get_rng_state, self._source.set_rng_state = save, go
        try:
            yield
        finally:
            self._source.get_rng_state, self._source.set_rng_state = real

    def _save(self, real: Callable[[], Tensor]) -> Tensor:
        return real()

    def _go(self, real: Callable[[], None]) -> None:
        real()


def _offset(state: Tensor) -> int:
    # CUDA: eight bytes of the seed, eight of the offset. Where numbers do not come by an offset, it
    # is not asked for.
    return int.from_bytes(bytes(state.tolist())[8:], "little") if state.numel() == 16 else 0


class CapturedRandomStates(RandomStates):
    """The same calls while CUDA captures, when no state can be read or written.

    A graph's kernels count their random numbers from an offset that their generator's state gives
    them before each replay. So the backward goes to states of their own, one for each that the
    forward saved, at the offsets that an eager step found.

    Args:
        device: whose default generator it is.
        offsets: see :class:`RandomStates`.

    Attributes:
        states: for graphs of the backward to register.
    """

    def __init__(self, device: torch.device, offsets: list[int]) -> None:
        super().__init__(torch.cuda)
        self._generator = torch.cuda.default_generators[device.index or 0]
        self._home = self._generator.graphsafe_get_state()
        self._eager_offsets = offsets
        self.states = [self._generator.clone_state() for _ in offsets]

    @contextmanager
    def following(
        self, forward: bool, on_save: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """See :meth:`RandomStates.following`."""
        try:
            with super().following(forward, on_save):
                yield
        finally:
            self._generator.graphsafe_set_state(self._home)
        if len(self.offsets) != len(self._eager_offsets) or self.place != HOME:
            raise RuntimeError(
                "The captured step saved other random states than the eager one. Please report"
                " this."
            )

    def _save(self, real: Callable[[], Tensor]) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)  # told from others by identity

    def _go(self, real: Callable[[], None]) -> None:
        self._generator.graphsafe_set_state(
            self.states[self.place] if self.place >= 0 else self._home
        )

    def begin_forward(self) -> None:
        """Before the forward is replayed."""
        self._replayed_from = self._generator.initial_seed(), self._generator.get_offset()

    def begin_backward(self) -> None:
        """Before the backward is replayed."""
        seed, offset = self._replayed_from
        for state, further in zip(self.states, self._eager_offsets, strict=True):
            state.manual_seed(seed)
            state.set_offset(offset + further)
