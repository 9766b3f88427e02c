"""Side streams for communication, and who waits for whom.

::

    compute  --e(u0)----e(u1)-----------...        e(u): unit u computes
    unshard     \\--AG(u1)--/ \\--AG(u2)--/         forked from compute when u0 is entered,
                                                   joined when u1 is
    reduce               ...RS(u3)...              forked when u3's gradients lie in the buffer

Both side streams fork from the *current* stream and join it, by events, so a CUDA graph that
captures the current stream captures them. Nothing uses ``record_stream``: pool memory is never
returned to the allocator, and other buffers are joined before they are. The CPU has no side
streams: gloo runs its own thread, and waiting on its work handles is the join. Whoever has one asks
it (``on_device``) instead of calling stand-ins, which would cost Python calls for every unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..collectives import ROOM
from ..support.torch_internals import InferenceMode


class Stream:
    """A stream beside the compute stream; none on the CPU, where nobody forks."""

    def __init__(self, device: torch.device) -> None:
        # whether work runs beside the host: a wait inside `run` then holds up this stream alone
        self.on_device = device.type == "cuda"
        if self.on_device:
            # High priority: a collective that waits behind compute kernels delays every rank.
            self._stream = torch.cuda.Stream(device, priority=-1)
        self._device = device

    @cached_property
    def room(self) -> Tensor:
        """[bytes] Values are rounded by way of it: in this side stream's work alone, which runs in
        order.
        """
        with InferenceMode(False):  # it is written to in training, too
            return torch.empty(ROOM, dtype=torch.uint8, device=self._device)

    def run(
        self, work: Callable[[], None], device: Sequence[Tensor] = (), host: Sequence[Tensor] = ()
    ) -> Any:
        """Do ``work`` beside the current stream, after all that was issued on it so far; return its
        end.

        It writes to ``device``, which is there for who joins, and to ``host``, for who waits.
        """
        # Hazards: readers of the bytes about to be overwritten, and the optimizer writing the shard
        # about to be sent.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
            return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """The host waits for ``mark``."""
        if mark is not None:
            mark.synchronize()

    def join(self, mark: torch.cuda.Event | None) -> None:
        """The current stream waits for ``mark``."""
        if mark is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(mark)
