"""Random states that a step saves, and restores in its backward, as activation checkpointing does.

A part of the forward that is computed again in the backward must draw the same numbers:
`torch.utils.checkpoint` saves the state of the default generator in the forward, sets it before the
second computation, and then sets the state of before that again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .compare import replaced


@contextmanager
def note_offsets(offsets: list[int]) -> Iterator[None]:
    """Wrap an eager forward on CUDA, and note the random states that it saves.

    Args:
        offsets: gets the distance of each state from that at the start, in random numbers of one
            thread of a CUDA kernel.
    """
    real_get = torch.cuda.get_rng_state
    start = _offset(real_get())
    offsets.clear()

    def get_rng_state(*args: Any) -> Tensor:
        state = real_get(*args)
        offsets.append(_offset(state) - start)
        return state

    with replaced(vars(torch.cuda), {"get_rng_state": get_rng_state}):
        yield


def _offset(state: Tensor) -> int:
    # The state of a CUDA generator has 16 bytes: eight of the seed, eight of the offset.
    return int.from_bytes(bytes(state.tolist())[8:], "little")


class CapturedRandomStates:
    """Handles ``get_rng_state`` and ``set_rng_state`` while CUDA captures.

    No state can be read or written then. Kernels in a graph count their random numbers from an
    offset, which the state of their generator gives them before each replay. So the captured
    backward uses a separate state for each that the forward saved. Before a replay these states get
    the offsets that an eager step found.

    Args:
        device: the device whose default generator is tracked.
        offsets: the offsets that an eager step found; see :func:`note_offsets`.

    Attributes:
        states: the separate states, which the graph of the backward must register.
    """

    def __init__(self, device: torch.device, offsets: list[int]) -> None:
        self._generator = torch.cuda.default_generators[device.index or 0]
        self._home = self._generator.graphsafe_get_state()
        self._offsets = list(offsets)
        self.states = [self._generator.clone_state() for _ in offsets]
        self._saved: list[Tensor] = []

    @contextmanager
    def track_calls(self, is_backward: bool) -> Iterator[None]:
        """Wrap a forward, or its backward.

        Raises:
            RuntimeError: the captured program saved other states than the eager one, or goes back
                to one in a way that no graph can repeat.
        """
        # Where a state that was saved leads to. Each of them once, but home as often as it is left.
        known = dict(zip(self._saved, self.states, strict=True)) if is_backward else {}
        is_home = True

        def get_rng_state(*_: object) -> Tensor:
            state = torch.empty(0, dtype=torch.uint8)  # only its identity counts
            if not is_backward:
                self._saved.append(state)
            elif is_home:
                known[state] = self._home
            return state

        def set_rng_state(state: Tensor, *_: object) -> None:
            nonlocal is_home
            found = known.pop(state, None)
            if found is None:
                raise RuntimeError(
                    "It goes back to a random state as no graph can, as dropout does in a"
                    " checkpoint inside of a re-entrant one. Make the outer one with"
                    " `use_reentrant=False`."
                )
            is_home = found is self._home
            self._generator.graphsafe_set_state(found)

        calls = {"get_rng_state": get_rng_state, "set_rng_state": set_rng_state}
        try:
            with replaced(vars(torch.cuda), calls):
                yield
        finally:
            self._generator.graphsafe_set_state(self._home)
        if len(self._saved) != len(self.states) or not is_home:
            raise RuntimeError("It saved other random states than in eager steps, or set others.")

    def begin(self, is_backward: bool) -> None:
        """Prepare the replay of the forward, or of the backward, which sets the separate states."""
        if not is_backward:
            self._start = self._generator.initial_seed(), self._generator.get_offset()
            return
        seed, start = self._start
        for state, offset in zip(self.states, self._offsets, strict=True):
            state.manual_seed(seed)
            state.set_offset(start + offset)
