"""`CudaGraphs` and, for machines without CUDA, `SoftwareGraphs` make the graphs of one run.

The CUDA graphs of a run share a stream and a memory pool.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch

from ...strategies.collectives import LocalCollectives
from ...strategies.support import without_collection
from .random_states import CapturedRandomStates, RandomStates
from .software_graph import OURS, ReportsWaits, SoftwareGraph, describe_line

_WAIT = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode is a prototype"


class Graph(Protocol):
    """Device work that was captured once and can be repeated."""

    def capture(self) -> AbstractContextManager[None]:
        """Record the device work of the body, without doing it."""

    def replay(self) -> None:
        """Do the recorded work."""

    def reset(self) -> None:
        """Free the graph."""


class CudaGraph:
    """A `torch.cuda.CUDAGraph` in a memory pool, captured in the current stream.

    Args:
        pool: the handle of the pool.
        around_capture: returns a context in which the program may save and set random states.
        before_replay: prepares random states.
        states: random states, besides that of the default generator, that kernels draw from.
    """

    def __init__(
        self,
        pool: Any,
        around_capture: Callable[[], AbstractContextManager[None]] = nullcontext,
        before_replay: Callable[[], None] = lambda: None,
        states: Sequence[torch.Generator] = (),
    ) -> None:
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool
        self._around_capture, self._before_replay = around_capture, before_replay
        for state in states:
            self._graph.register_generator_state(state)
        self.reset = self._graph.reset

    @contextmanager
    def capture(self) -> Iterator[None]:
        """See :meth:`Graph.capture`."""
        # hazard: if the garbage collector destroys another graph during this capture, CUDA ends the
        # capture with an error. `torch.cuda.graph` collects only on request.
        gc.collect()
        # Makes cuBLAS allocate its workspace in the pool, where `torch.cuda.empty_cache` cannot
        # free it.
        torch._C._cuda_clearCublasWorkspaces()
        # hazard: with the default mode, "global", calls of CUDA in other threads (loaders' pinning
        # threads, NCCL's watchdog) would end the capture with an error.
        capture = torch.cuda.graph(
            self._graph, self._pool, torch.cuda.current_stream(), "thread_local"
        )
        try:
            with without_collection(), capture, self._around_capture():
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


class CudaGraphs:
    """Makes graphs for one device, and moves the training into their stream.

    Autograd runs a node of a backward in the stream of its forward. So everything runs in the
    stream of the captures, eager steps and the optimizer too, and no stream waits for another
    between a step and its graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._outer_stream: torch.cuda.Stream | None = None  # current before training
        # That of most graphs, and those of graphs that are replayed out of order.
        self._pools: list[Any] = [torch.cuda.graph_pool_handle()]

    def enter_stream(self) -> None:
        """Make the stream of captures the current one, when training begins."""
        self._outer_stream = torch.cuda.current_stream(self._device)
        # hazard: kernels that set up the training may still write tensors that a step reads.
        self._stream.wait_stream(self._outer_stream)
        torch.cuda.set_stream(self._stream)

    def leave_stream(self) -> None:
        """Make the earlier stream the current one again, when training is over."""
        if self._outer_stream is not None:
            # hazard: the last step may still write tensors that later kernels read.
            self._outer_stream.wait_stream(self._stream)
            torch.cuda.set_stream(self._outer_stream)
            self._outer_stream = None

    def make_graph(self) -> Graph:
        """Return a new graph, for a program that draws no random numbers."""
        return CudaGraph(self._pools[0])

    def make_pair(self, offsets: list[int], own_pool: bool = False) -> tuple[Graph, Graph]:
        """Return new graphs for a forward and for its backward.

        Args:
            offsets: see :class:`~.random_states.RandomStates`.
            own_pool: use another pool than other graphs. Those of one pool overwrite each other's
                memory unless they are replayed in the order of their captures.
        """
        if own_pool:
            self._pools.append(torch.cuda.graph_pool_handle())
        pool, states = self._pools[-own_pool], CapturedRandomStates(self._device, offsets)
        forward = partial(states.track_calls, True), states.begin_forward
        backward = partial(states.track_calls, False), states.begin_backward
        return CudaGraph(pool, *forward), CudaGraph(pool, *backward, states.states)

    def renew_pools(self) -> None:
        """Use a new pool, after all graphs, and so their pools, were reset."""
        self._pools = [torch.cuda.graph_pool_handle()]

    def track_random_states(self) -> RandomStates | None:
        """Return what tracks random states that an eager step saves and sets."""
        return RandomStates()

    @contextmanager
    def report_waits(self, found: list[str]) -> Iterator[None]:
        """Add to ``found`` each line of the body in which torch waits for the device.

        Torch's sync debug mode reports the waits, as a warning each; it does not see all. It
        reports those in a backward when the backward is over.
        """
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        for each in caught:
            place = each.filename, each.lineno
            if not str(each.message).startswith((_WAIT, _PROTOTYPE)):
                warnings.warn_explicit(each.message, each.category, *place)
            elif _WAIT in str(each.message) and not each.filename.startswith(OURS):
                found.append(describe_line(*place))

    def pool_nbytes(self) -> int:
        """Return the reserved bytes of the pools; 0 if the allocator does not report them."""
        if torch.cuda.get_allocator_backend() != "native":
            return 0
        segments = [s for pool in self._pools for s in torch.cuda.memory_snapshot(pool)]
        return sum(segment["total_size"] for segment in segments)


class SoftwareGraphs:
    """Makes graphs on the CPU, for tests and examples: there is one stream, and no pool.

    Args:
        communicator: see :class:`SoftwareGraph`.
    """

    def __init__(self, communicator: LocalCollectives | None = None) -> None:
        self._communicator = communicator

    def enter_stream(self) -> None:
        """See :meth:`CudaGraphs.enter_stream`."""

    leave_stream = renew_pools = track_random_states = enter_stream

    def make_graph(self) -> Graph:
        """See :meth:`CudaGraphs.make_graph`."""
        return SoftwareGraph(self._communicator)

    def make_pair(self, offsets: list[int], own_pool: bool = False) -> tuple[Graph, Graph]:
        """See :meth:`CudaGraphs.make_pair`."""
        return self.make_graph(), self.make_graph()

    def report_waits(self, found: list[str]) -> AbstractContextManager[object]:
        """See :meth:`CudaGraphs.report_waits`."""
        return ReportsWaits(found)

    def pool_nbytes(self) -> int:
        """See :meth:`CudaGraphs.pool_nbytes`."""
        return 0
