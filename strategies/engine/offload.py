"""Shards that live in host memory, of which a device has what it computes with.

::

    unshard stream   H2D(u0) gather(u0)  H2D(u1) gather(u1)          what is sent, of the values
    reduce stream                 scatter(u1) D2H(u1)  scatter(u0) D2H(u0)     the gradients
    host worker                                                   step(u0) step(u1) ...

Sums of a later micro-batch are added on the device, which the earlier ones come to for that. The
host steps, unit by unit in the order of their definition, a forward's mostly, while the device goes
on; whoever looks at values, gradients or optimizer state waits for what it looks at.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .chunk import Chunk
from .layout import REGION_BYTES, round_up
from .norms import squared_norms
from .streams import Stream

_PCI = Path("/sys/bus/pci/devices")

OffloadKind = Literal["optimizer", "parameters"]


@dataclass(frozen=True)
class Offload:
    """What lives in host memory.

    Args:
        kind: "optimizer" keeps master values, gradients and optimizer state there, and on the
            device a shard of what is sent; "parameters" keeps that there, too.
        budget: bytes of model state that may stay on the device, of the units that are defined
            first; a parameter is counted as with Adam.
    """

    kind: OffloadKind
    budget: int = 0

    @staticmethod
    def cost(chunk: Chunk) -> int:
        """Bytes of model state on the device if ``chunk`` stays there."""
        return chunk.layout.shard_numel * chunk.master_dtype.itemsize * (4 if chunk.trained else 1)

    def place(self, chunk: Chunk) -> Chunk:
        """``chunk``, in host memory if it belongs there."""
        if self.kind == "optimizer" and not chunk.trained:
            return chunk
        return HostChunk(chunk.entries, chunk.layout, chunk.dtype, chunk.master_dtype)


def processors_near(device: torch.device) -> set[int]:
    """Those of this process at the NUMA node of a GPU; all, if the system does not say which."""
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the address
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    near = set()
    with suppress(OSError):
        for part in (_PCI / address / "local_cpulist").read_text().split(","):  # "0-15,32-47"
            first, _, last = part.strip().partition("-")
            near |= set(range(int(first), int(last or first) + 1))
    return os.sched_getaffinity(0) & near or os.sched_getaffinity(0)


def start_worker(device: torch.device) -> Executor:
    """A thread of the host that does one thing after another, on half of the rank's cores, near
    the device.
    """

    def begin() -> None:
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
        if device.type == "cuda":
            # hazard: a thread's own device is the first one, where waiting for an event of another
            # would make a context
            torch.cuda.set_device(device)
            os.sched_setaffinity(0, processors_near(device))  # of this thread, and those it starts

    worker = ThreadPoolExecutor(1, "zero3-host-worker", initializer=begin)
    worker.submit(int).result()
    # what the worker has set would also be that of threads to come
    torch.set_num_threads(torch.get_num_threads())
    return worker


class HostMemory:
    """Memory of the host, registered with CUDA in one piece: pages that are copied from and to
    without the host's help. It is given away in pieces, all of which come back at once.

    `pin_memory` would round each tensor up to a power of two.

    Attributes:
        nbytes: its size.
        taken: bytes that were given away; 0 as nothing is in use any more.

    Raises:
        OSError: there is not so much.
        RuntimeError: it cannot be registered, as the limit of locked memory is lower (`ulimit -l`).
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # hazard: loaders fork. Shared pages stay where the device has them; of private ones the
        # process would get other ones as it writes, or each fork a copy.
        pages = mmap.mmap(-1, max(nbytes, 1))
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
        self.nbytes, self.taken = nbytes, 0
        if device.type == "cuda" and nbytes:
            runtime, start = torch.cuda.cudart(), self._memory.data_ptr()
            torch.cuda.check_error(runtime.cudaHostRegister(start, nbytes, 0))
            weakref.finalize(self._memory, runtime.cudaHostUnregister, start)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """[numel] of it, or of other memory if so much is not left: what is copied from and to that
        goes by way of the host.
        """
        start, stop = self.taken, self.taken + numel * dtype.itemsize
        self.taken = round_up(stop, REGION_BYTES)
        if stop > self.nbytes:
            return torch.empty(numel, dtype=dtype, device="cpu")
        return self._memory[start:stop].view(dtype)


class Host:
    """The host's side of an engine: its memory, and its worker.

    Args:
        chunks: all that live there.
        device: that computes.
        worker: does the host's work, in order.
    """

    def __init__(
        self, offload: Offload, chunks: Sequence[HostChunk], device: torch.device, worker: Executor
    ) -> None:
        self.kind, self.device, self.worker = offload.kind, device, worker
        for chunk in chunks:
            chunk.host = self
        sizes = [nbytes for chunk in chunks for nbytes in chunk.sizes()]
        self.nbytes = sum(round_up(size, REGION_BYTES) for size in sizes)
        # whoever touches memory first has it at its NUMA node
        self.memory = worker.submit(partial(HostMemory, self.nbytes, device)).result()


class HostChunk(Chunk):
    """A chunk that lives in host memory.

    Reading :attr:`values` and :attr:`gradients` waits for the worker, and for copies from and to
    them.
    """

    host: Host
    streams: tuple[Stream, Stream]  # of unshards, and of reductions
    stored: Any = None  # the end of the last copy to its gradients
    _ticket: Future[None] | None = None  # what the worker has to do
    _read: Any = None  # the end of the last copy from its values
    _rounded: Tensor  # [shard] the values in the dtype that is sent; themselves, if it is theirs
    source: Tensor  # [shard] what is sent: on the device with "optimizer", else the rounded values
    _is_rounded = False  # `_rounded` is of the values as they are
    _is_loaded = False  # so is `source`

    def sizes(self) -> list[int]:
        """Bytes of each tensor that it has in host memory."""
        numel = self.layout.shard_numel
        sizes = [numel * self.master_dtype.itemsize] * (2 if self.trained else 1)
        rounds = self.dtype != self.master_dtype
        return [*sizes, numel * self.dtype.itemsize] if rounds else sizes

    def own(self, values: Tensor, rank: int) -> None:
        """See :meth:`Chunk.own`."""
        numel, take = self.layout.shard_numel, self.host.memory.take
        self._values = take(numel, self.master_dtype)
        self.device = values.device
        self._values.copy_(values)
        if self.trained:
            self._gradients = take(numel, self.master_dtype)
        is_same = self.dtype == self.master_dtype
        self._rounded = self.source = self._values if is_same else take(numel, self.dtype)
        if self.host.kind == "optimizer":
            self.source = torch.empty(numel, dtype=self.dtype, device=self.host.device)
        self._find_parts(self._values, rank)

    def shards(self) -> list[Tensor]:
        """See :meth:`Chunk.shards`."""
        return list(dict.fromkeys([self._values, self._rounded, self.source]))

    # ---------------------------------------------------------------------------------- who waits

    def wait_for_host(self) -> None:
        """See :meth:`Chunk.wait_for_host`; an error of the worker stays one."""
        if (ticket := self._ticket) is not None:
            ticket.result()
            self._ticket = None

    def begin_write(self) -> None:
        """See :meth:`Chunk.begin_write`."""
        self.wait_for_host()
        self._is_rounded = self._is_loaded = False
        self.streams[0].wait(self._read)  # hazard: writing to what a copy engine still reads

    def read(self) -> Tensor:
        """See :meth:`Chunk.read`."""
        self.wait_for_host()
        return self._values

    @property
    def values(self) -> Tensor:  # type: ignore[override]
        """[shard], the master values, which may be written to."""
        self.begin_write()
        return self._values

    @property
    def gradients(self) -> Tensor | None:  # type: ignore[override]
        """[shard], reduced; they keep their memory."""
        return self.room_for_gradients() if self.trained else None

    def room_for_gradients(self) -> Tensor:
        """See :meth:`Chunk.room_for_gradients`."""
        self.wait_for_host()
        self.streams[1].wait(self.stored)  # hazard: sums that still arrive, or are being read
        return self._gradients

    # ------------------------------------------------------------------------------------- unshard

    def begin_load(self) -> None:
        """What :meth:`load` and the unshard read is there; on the host."""
        self.wait_for_host()  # hazard: sending values of before the step
        if not self._is_rounded:
            self.streams[0].wait(self._read)  # hazard: as in `begin_write`
            self._round()

    def load(self) -> None:
        """In the stream of unshards: the device gets what has changed."""
        if not self._is_loaded:
            self.source.copy_(self._rounded, non_blocking=True)
            self._is_loaded = True

    def end_load(self, mark: Any) -> None:
        """The copies end at ``mark``."""
        self._read = mark

    def _round(self) -> None:
        self._rounded.copy_(self._values)
        self._is_rounded, self._is_loaded = True, False

    # -------------------------------------------------------------------------------------- reduce

    def load_gradients(self, scratch: Tensor) -> Tensor:
        """In the stream of reductions: [shard] of ``scratch`` [bytes], which is the device's, with
        the gradients so far if there are any.
        """
        target = scratch.view(self.master_dtype)[: self.layout.shard_numel]
        if self.has_sums:
            target.copy_(self._gradients, non_blocking=True)
        return target

    def store_gradients(self, gradients: Tensor) -> None:
        """In the same stream: send what :meth:`load_gradients` returned, added to."""
        self.squared_norms = squared_norms([entry.part_of(gradients) for entry in self.entries])
        self._gradients.copy_(gradients, non_blocking=True)

    # ---------------------------------------------------------------------------------------- step

    def step_with(self, work: Callable[[Tensor], None]) -> None:
        """Let the worker change the values by ``work``, which gets the gradients."""
        before = self._ticket

        def step() -> None:
            if before is not None:
                before.result()  # has failed, perhaps
            try:
                with torch.no_grad():
                    self._step(work)
            except Exception as error:
                entry = self.entries[0]
                raise RuntimeError(
                    f"Offload: the host's work on parameter {entry.name!r} (unit"
                    f" {entry.unit.name}) and its neighbours failed"
                    f" ({type(error).__name__}: {error})."
                ) from error

        self._ticket = self.host.worker.submit(step)

    def _step(self, work: Callable[[Tensor], None]) -> None:
        self.streams[0].wait(self._read)  # hazard: as in `begin_write`
        # nothing is stored before this step is over: `Gradients.begin_backward` waits for it
        self.streams[1].wait(self.stored)  # hazard: stepping with sums that still arrive
        work(self._gradients)
        self._round()
