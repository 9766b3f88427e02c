"""CUDA graphs of one run: they share a stream and a memory pool. And their stand-ins for machines
without CUDA.
"""

from __future__ import annotations

import copy
import gc
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch

from ...strategies.collectives import LocalCollectives
from ...strategies.support import without_collection
from .random_states import CapturedRandomStates
from .software_graph import SoftwareGraph


class Graph(Protocol):
    """Device work that was captured once and can be repeated."""

    def capture(self) -> AbstractContextManager[None]:
        """Inside, device work is recorded and not done."""

    def replay(self) -> None:
        """Do it."""

    def reset(self) -> None:
        """Free it."""


class CudaGraph:
    """A `torch.cuda.CUDAGraph` in a shared pool.

    Args:
        stream: of all captures.
        pool: of memory.
        generators: that are drawn from, besides the default one.
        around_capture: inside it the program may save random states and go back to them.
        before_replay: is called.
    """

    def __init__(
        self,
        stream: torch.cuda.Stream,
        pool: object,
        generators: Sequence[torch.Generator] = (),
        around_capture: Callable[[], AbstractContextManager[None]] = nullcontext,
        before_replay: Callable[[], None] = lambda: None,
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._stream, self._pool = stream, pool
        self._around_capture, self._before_replay = around_capture, before_replay
        for generator in generators:
            self._graph.register_generator_state(generator)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """See :meth:`Graph.capture`."""
        # A graph that the garbage collector destroys during a capture ends it with an error.
        gc.collect()
        # cuBLAS's workspace of the capture lies in the pool, so that `torch.cuda.empty_cache`
        # cannot free it.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # Only this thread: loaders' pinning threads and NCCL's watchdog call CUDA as they like.
            options = {
                "pool": self._pool,
                "stream": self._stream,
                "capture_error_mode": "thread_local",
            }
            with (
                without_collection(),
                torch.cuda.graph(self._graph, **options),
                self._around_capture(),
            ):
                yield
        except BaseException:
            self.reset()
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def replay(self) -> None:
        """See :meth:`Graph.replay`."""
        self._before_replay()
        self._graph.replay()

    def reset(self) -> None:
        """See :meth:`Graph.reset`."""
        self._graph.reset()


class CudaGraphs:
    """Makes graphs for one device, and puts the training into their stream.

    Nodes of autograd belong to the stream in which they were made. So everything runs in the stream
    of the captures, eager steps and the optimizer too, and no stream waits for another between a
    step and its graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._outer: torch.cuda.Stream | None = None
        self._pool = torch.cuda.graph_pool_handle()
        self._others: list[object] = []  # pools of graphs that are replayed out of order

    def enter(self) -> None:
        """Training begins."""
        self._outer = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(self._outer)
        torch.cuda.set_stream(self._stream)

    def leave(self) -> None:
        """Training is over."""
        if self._outer is not None:
            self._outer.wait_stream(self._stream)
            torch.cuda.set_stream(self._outer)
            self._outer = None

    def make(self) -> Graph:
        """A new graph, of something that draws no random numbers."""
        return CudaGraph(self._stream, self._pool)

    def make_pair(
        self, generators: Sequence[torch.Generator], offsets: list[int]
    ) -> tuple[Graph, Graph]:
        """New graphs of a forward and of its backward.

        Args:
            generators: that they draw from, besides the default one.
            offsets: see :class:`~.graph_random.RandomStates`.
        """
        states = CapturedRandomStates(self._device, offsets)
        forward = partial(states.following, True), states.begin_forward
        backward = partial(states.following, False), states.begin_backward
        return (
            CudaGraph(self._stream, self._pool, generators, *forward),
            CudaGraph(self._stream, self._pool, [*generators, *states.states], *backward),
        )

    def apart(self) -> CudaGraphs:
        """Makes graphs in a pool of their own: those of one pool overwrite each other's memory
        unless replayed in turn.
        """
        other = copy.copy(self)
        other._pool = torch.cuda.graph_pool_handle()
        self._others.append(other._pool)
        return other

    def renew(self) -> None:
        """All graphs were reset, and their pools with them."""
        self._pool = torch.cuda.graph_pool_handle()
        self._others.clear()

    def pool_nbytes(self) -> int:
        """Memory of the pools, reserved; 0 if the allocator does not tell."""
        if torch.cuda.get_allocator_backend() != "native":
            return 0
        pools = [self._pool, *self._others]
        return sum(
            segment["total_size"] for pool in pools for segment in torch.cuda.memory_snapshot(pool)
        )


_WAIT = "called a synchronizing CUDA operation"


@contextmanager
def telling_waits(note: Callable[[FrameType | None], None]) -> Iterator[None]:
    """Inside, ``note`` is called with the frame in which torch waits for the device, as far as its
    own debug mode sees it.

    What it sees in a backward is told when that is over.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=_WAIT)
        show, before = warnings.showwarning, torch.cuda.get_sync_debug_mode()

        def tell(message: Any, *rest: Any) -> None:
            if not str(message).startswith(_WAIT):
                show(message, *rest)
                return
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__") == "warnings":
                frame = frame.f_back
            note(frame)

        torch.cuda.set_sync_debug_mode("warn")
        warnings.showwarning = tell
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class SoftwareGraphs:
    """The same on the CPU, for tests: there is one stream, and no pool.

    Args:
        communicator: see :class:`SoftwareGraph`.
    """

    def __init__(self, communicator: LocalCollectives | None = None) -> None:
        self._communicator = communicator

    def enter(self) -> None:
        """See :meth:`CudaGraphs.enter`."""

    leave = renew = enter

    def apart(self) -> SoftwareGraphs:
        """See :meth:`CudaGraphs.apart`."""
        return self

    def make(self) -> Graph:
        """See :meth:`CudaGraphs.make`."""
        return SoftwareGraph(self._communicator)

    def make_pair(
        self, generators: Sequence[torch.Generator], offsets: list[int]
    ) -> tuple[Graph, Graph]:
        """See :meth:`CudaGraphs.make_pair`."""
        return self.make(), self.make()

    def pool_nbytes(self) -> int:
        """See :meth:`CudaGraphs.pool_nbytes`."""
        return 0
