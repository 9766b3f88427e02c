"""`CudaGraphs` and, for machines without CUDA, `SoftwareGraphs` make the graphs of one run.

The CUDA graphs of a run share a stream, and those of a step and of optimizers a memory pool.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor

from ...strategies.support import clear_cublas_workspaces, without_collection
from .software_graph import OURS, ReportsWaits, SoftwareGraph, describe_wait

_WAIT = "called a synchronizing CUDA operation"
_PROTOTYPE = "Synchronization debug mode is a prototype"
_OFFSET = 1  # in a state of a CUDA generator, two int64: its seed and its offset


class CudaGraph:
    """A `torch.cuda.CUDAGraph` in a memory pool, captured in the current stream: a forward, or the
    backward of ``forward``.

    Kernels in it count their random numbers from where the generator is at a replay, and so do the
    states that activation checkpoints save and restore in a capture, as torch allows since 2.10.
    Those that a forward saves must mean the same in its backward. So a backward is captured from
    where its forward ended, and replayed from where that began.
    """

    _ended: Tensor  # the state at the end of the capture, counted from the beginning of a replay
    _start = 0  # the generator's offset at the beginning of the last replay

    def __init__(self, pool: Any, device: torch.device, forward: CudaGraph | None = None) -> None:
        self._graph, self._pool, self._forward = torch.cuda.CUDAGraph(), pool, forward
        # hazard: to set the offset of the default generator makes cuDNN begin the random states of
        # its recurrent layers anew, which no eager step does. This is another of the same state.
        default = torch.cuda.default_generators[device.index or 0]
        self._generator = default.graphsafe_get_state()
        self.reset = self._graph.reset

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record the device work of the body, without doing it."""
        # hazard: if the garbage collector destroys another graph during this capture, CUDA ends the
        # capture with an error. `torch.cuda.graph` collects only on request.
        gc.collect()
        # Makes cuBLAS allocate its workspace in the pool, where `torch.cuda.empty_cache` cannot
        # free it.
        clear_cublas_workspaces()
        # hazard: with the default mode, "global", calls of CUDA in other threads (loaders' pinning
        # threads, NCCL's watchdog) would end the capture with an error.
        capture = torch.cuda.graph(
            self._graph, self._pool, torch.cuda.current_stream(), "thread_local"
        )
        try:
            with without_collection(), capture:
                if self._forward is not None:
                    self._generator.set_state(self._forward._ended)
                yield
                self._ended = self._generator.get_state()
                # hazard: a replay gives no seed to a graph that ends where it began, as one does
                # whose numbers are drawn inside of `fork_rng`. So each ends later.
                later = self._ended.clone()
                later.view(torch.int64)[_OFFSET] += 4  # the least step
                self._generator.set_state(later)
        except BaseException:
            self.reset()
            raise
        finally:
            clear_cublas_workspaces()

    def replay(self) -> None:
        """Do the recorded work."""
        before, forward = self._generator.get_offset(), self._forward
        self._start = before if forward is None else forward._start
        self._generator.set_offset(self._start)
        self._graph.replay()
        # Other programs may have drawn numbers between a forward and its backward.
        drawn = _offset(self._ended) - (0 if forward is None else _offset(forward._ended))
        self._generator.set_offset(before + drawn)


def _offset(state: Tensor) -> int:
    return int(state.view(torch.int64)[_OFFSET])


class CudaGraphs:
    """Makes graphs for one device, and moves the training into their stream.

    Autograd runs a node of a backward in the stream of its forward. So everything runs in the
    stream of the captures, eager steps and the optimizer too.

    Attributes:
        pools: that of most graphs, or those of graphs that are replayed out of order. Clear it when
            all graphs, and so their pools, were reset.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pools = list[Any]()

    @contextmanager
    def in_stream(self) -> Iterator[None]:
        """Make the stream of captures the current one, as long as training goes on."""
        stream, outer = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        # hazard: kernels that set up the training may still write tensors that a step reads.
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            yield
        # hazard: the last step may still write tensors that later kernels read.
        outer.wait_stream(stream)

    def make_pair(self, own_pool: bool = False) -> list[CudaGraph]:
        """Return new graphs for a forward and for its backward, in a pool of their own if need be:
        those of one pool overwrite each other's memory unless they are replayed in the order of
        their captures.
        """
        if own_pool or not self.pools:
            self.pools.append(torch.cuda.graph_pool_handle())
        forward = CudaGraph(self.pools[-1], self._device)
        return [forward, CudaGraph(self.pools[-1], self._device, forward)]

    @contextmanager
    def watch(self, problems: list[str]) -> Iterator[None]:
        """Add to ``problems`` each line of an eager forward or backward that waits for the device.

        Torch's sync debug mode reports waits, as a warning each; it does not see all. It reports
        those in a backward when the backward is over.
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
            if not str(each.message).startswith((_WAIT, _PROTOTYPE)):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
            elif _WAIT in str(each.message) and not each.filename.startswith(OURS):
                problems.append(describe_wait(FrameSummary(each.filename, each.lineno, "")))


class SoftwareGraphs:
    """Makes graphs on the CPU, for tests and examples: there is one stream, and no pool. The
    exchanges of `zero3`'s engine, if there is one, are recorded.
    """

    in_stream, watch = nullcontext, ReportsWaits

    def __init__(self, engine: Any) -> None:
        self._communicator, self.pools = getattr(engine, "collectives", None), list[Any]()

    def make_pair(self, own_pool: bool = False) -> list[SoftwareGraph]:
        """See :meth:`CudaGraphs.make_pair`."""
        return [SoftwareGraph(self._communicator) for _ in range(2)]
