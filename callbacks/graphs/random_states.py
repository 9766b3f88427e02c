"""Random states that a step saves, and restores in its backward, as activation checkpointing does.

A part of the forward that is computed again in the backward must draw the same numbers:
`torch.utils.checkpoint` saves the state of the default generator in the forward, sets it before the
second computation, and then sets the state of before that again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Positions of a generator, besides the numbers of the states that the forward saved.
HOME = -1  # the state that the running pass has reached
LOST = -2  # another state: saved in a second computation, or set a second time


class RandomStates:
    """Tracks the calls of ``get_rng_state`` and ``set_rng_state`` in an eager step on CUDA.

    Args:
        source: the module with these functions, `torch.cuda`.

    Attributes:
        position: which state the generator is in: `HOME`, `LOST`, or the number of a saved state.
        is_home: whether a pass ended where it would without the calls, and drew from no lost state.
        offsets: for each state that the forward saved, its distance from the state at the start of
            the forward, in random numbers of one thread of a CUDA kernel.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.position, self.is_home, self.offsets = HOME, True, list[int]()

    @contextmanager
    def track_calls(self, forward: bool) -> Iterator[None]:
        """Wrap a forward, or its backward."""
        real_get, real_set = real = self._source.get_rng_state, self._source.set_rng_state
        if forward:
            self._start = self._read_offset(real_get)
            self.offsets = []
            self._saved: list[tuple[Tensor, int]] = []  # states and their positions
            self._visited: set[int] = set()
        set_offset = 0  # of the state that was set last

        def get_rng_state(*args: object) -> Tensor:
            state = self._get_state(lambda: real_get(*args))
            if forward:
                self.offsets.append(_offset(state) - self._start)
                position = len(self._saved)
            else:
                position = HOME if self.position == HOME else LOST
            self._saved.append((state, position))
            return state

        def set_rng_state(state: Tensor, *args: object) -> None:
            nonlocal set_offset
            if self.position == LOST and self._read_offset(real_get) != set_offset:
                self.is_home = False
            position = next((number for saved, number in self._saved if saved is state), LOST)
            self.position = LOST if position in self._visited else position
            self._visited |= {position} - {HOME}
            set_offset = _offset(state)
            self._set_state(lambda: real_set(state, *args))

        self._source.get_rng_state, self._source.set_rng_state = get_rng_state, set_rng_state
        try:
            yield
        finally:
            self._source.get_rng_state, self._source.set_rng_state = real
            self.is_home &= self.position == HOME

    def _read_offset(self, real: Callable[[], Tensor]) -> int:
        return _offset(real())

    def _get_state(self, real: Callable[[], Tensor]) -> Tensor:
        return real()

    def _set_state(self, real: Callable[[], None]) -> None:
        real()


def _offset(state: Tensor) -> int:
    # The state of a CUDA generator has 16 bytes: eight of the seed, eight of the offset. Other
    # generators have no offset, and none of theirs is used.
    return int.from_bytes(bytes(state.tolist())[8:], "little") if state.numel() == 16 else 0


class CapturedRandomStates(RandomStates):
    """Handles the same calls while CUDA captures, when no state can be read or written.

    Kernels in a graph count their random numbers from an offset, which the state of their generator
    gives them before each replay. So the captured backward uses a separate state for each that the
    forward saved. Before a replay these states get the offsets that an eager step found.

    Args:
        device: the device whose default generator is tracked.
        offsets: the offsets that an eager step found; see :class:`RandomStates`.

    Attributes:
        states: the separate states, which the graph of the backward must register.
    """

    def __init__(self, device: torch.device, offsets: list[int]) -> None:
        super().__init__(torch.cuda)
        self._generator = torch.cuda.default_generators[device.index or 0]
        self._home = self._generator.graphsafe_get_state()
        self._eager_offsets = offsets
        self.states = [self._generator.clone_state() for _ in offsets]

    @contextmanager
    def track_calls(self, forward: bool) -> Iterator[None]:
        """See :meth:`RandomStates.track_calls`.

        Raises:
            RuntimeError: the captured step saved other states than the eager one.
        """
        try:
            with super().track_calls(forward):
                yield
        finally:
            self._generator.graphsafe_set_state(self._home)
        if len(self.offsets) != len(self._eager_offsets) or self.position != HOME:
            raise RuntimeError(
                "The captured step saved other random states than the eager one. Please report"
                " this."
            )

    def _read_offset(self, real: Callable[[], Tensor]) -> int:
        return 0

    def _get_state(self, real: Callable[[], Tensor]) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)  # only its identity counts

    def _set_state(self, real: Callable[[], None]) -> None:
        self._generator.graphsafe_set_state(
            self.states[self.position] if self.position >= 0 else self._home
        )

    def begin_forward(self) -> None:
        """Note seed and offset of the generator before the forward is replayed."""
        self._replay_start = self._generator.initial_seed(), self._generator.get_offset()

    def begin_backward(self) -> None:
        """Set the separate states before the backward is replayed."""
        seed, start = self._replay_start
        for state, offset in zip(self.states, self._eager_offsets, strict=True):
            state.manual_seed(seed)
            state.set_offset(start + offset)
