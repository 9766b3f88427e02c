"""Where memory figures come from: the CUDA allocator, the driver, or the process itself.

A sample is taken several times a step, so it must be cheap and must not wait for the device. All
sources here read counters that the host keeps. Sizes are bytes.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch


class Sample(NamedTuple):
    """What is in use now, and the largest since the peaks were last reset."""

    allocated: int  # in tensors; for a process: resident
    reserved: int  # taken from the device; for a process: resident
    peak_allocated: int
    peak_reserved: int
    inactive: (
        int  # reserved, unused, and not free for every request: split blocks, free heap chunks
    )
    # what a leak grows: allocated; for a process malloc'ed bytes in use, where just read
    live: int | None
    graph_pool: int = 0  # reserved by the private pools of CUDA graphs
    retries: int = 0  # times the allocator had to empty its cache, since the process started
    ooms: int = 0  # out-of-memory errors, caught ones too

    @property
    def waste(self) -> int:
        """Reserved and unused. Graph pools do not count: their blocks look unused between
        replays.
        """
        # a process: everything resident is in use, but for the heap's holes
        if self.reserved == self.allocated:
            return min(self.inactive, self.reserved)
        return max(0, self.reserved - self.graph_pool - self.allocated)

    @property
    def fragmentation(self) -> float:
        """The one figure: share of reserved memory that is unused, 0 to 1."""
        return self.waste / self.reserved if self.reserved else 0.0


class Surroundings(NamedTuple):
    """Figures that cost more to read, taken on logging steps."""

    capacity: int  # of the device, or of the machine
    free: int  # to anyone
    outside: int  # used by other processes, by the CUDA context and by NCCL
    pinned_allocated: int = 0
    pinned_reserved: int = 0


class MemorySource(Protocol):
    """What the tracker needs of a device."""

    name: str  # in log lines and figures: "cuda", "driver" or "process"
    device_type: str  # of the tensors that it counts

    def read(self, thorough: bool = False) -> Sample:
        """The figures now; never waits for the device. `thorough` may add what costs more."""
        ...

    def read_surroundings(self) -> Surroundings:
        """The slower figures."""
        ...

    def reset_peaks(self) -> None:
        """Let the peaks start again from what is in use now."""
        ...

    def is_busy(self) -> bool:
        """Whether the device must not be asked now: a CUDA graph is being captured."""
        ...

    def close(self) -> None:
        """No more readings."""
        ...


def choose_source(device: torch.device) -> MemorySource:
    """The source for a run on this device."""
    if device.type != "cuda":
        return ProcessSource()
    if torch.cuda.memory.get_allocator_backend() in ("native", "cudaMallocAsync"):
        return CUDASource(device)
    return DriverSource(device)


def sample_from_stats(stats: Mapping[str, Any]) -> Sample:
    """From `torch.cuda.memory_stats_as_nested_dict`; keys that a torch version lacks count as 0."""
    allocated, reserved = _all(stats, "allocated_bytes"), _all(stats, "reserved_bytes")
    return Sample(
        allocated=allocated["current"],
        reserved=reserved["current"],
        peak_allocated=allocated["peak"],
        peak_reserved=reserved["peak"],
        inactive=_all(stats, "inactive_split_bytes")["current"],
        live=allocated["current"],
        graph_pool=_sum_current(stats.get("reserved_bytes_by_private_pools", 0)),
        retries=stats.get("num_alloc_retries", 0),
        ooms=stats.get("num_ooms", 0),
    )


def _all(stats: Mapping[str, Any], name: str) -> Mapping[str, int]:
    return stats.get(name, {}).get("all", {"current": 0, "peak": 0})


def _sum_current(node: Any) -> int:
    """Current bytes over all pools, however deep the pools are nested."""
    if isinstance(node, Mapping):
        return (
            node["all"]["current"]
            if "all" in node
            else sum(_sum_current(child) for child in node.values())
        )
    return int(node)


class CUDASource:
    """torch's allocator on one device."""

    name, device_type = "cuda", "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self, thorough: bool = False) -> Sample:
        """One call; `torch.cuda.memory_allocated` and its like would each build and sort all
        figures.
        """
        return sample_from_stats(torch.cuda.memory_stats_as_nested_dict(self.device))

    def read_surroundings(self) -> Surroundings:
        """Asks the driver, which does not wait for kernels either."""
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = _all(torch.cuda.memory_stats_as_nested_dict(self.device), "reserved_bytes")[
            "current"
        ]
        host = torch.cuda.host_memory_stats()
        return Surroundings(
            capacity=total,
            free=free,
            outside=max(0, total - free - reserved),
            pinned_allocated=host.get("active_bytes.current", 0),
            pinned_reserved=host.get("allocated_bytes.current", 0),
        )

    def reset_peaks(self) -> None:
        """Process-wide: other readers of the peaks see the reset too."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def is_busy(self) -> bool:
        """Allocator calls from a capture could invalidate it."""
        return torch.cuda.is_current_stream_capturing()

    def close(self) -> None:
        """Nothing to give back."""


class DriverSource(CUDASource):
    """A pluggable allocator keeps no figures; the driver knows only what the whole device has
    used.
    """

    name = "driver"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._peak = 0

    def read(self, thorough: bool = False) -> Sample:
        """Peaks are those of the samples: what rose and fell between two of them is not seen."""
        free, total = torch.cuda.mem_get_info(self.device)
        used = total - free
        self._peak = max(self._peak, used)
        return Sample(used, used, self._peak, self._peak, inactive=0, live=used)

    def read_surroundings(self) -> Surroundings:
        """Own and foreign use cannot be told apart here."""
        free, total = torch.cuda.mem_get_info(self.device)
        return Surroundings(capacity=total, free=free, outside=0)

    def reset_peaks(self) -> None:
        """Start again at the next sample."""
        self._peak = 0


class _HeapInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
        )
    ]


class ProcessSource:
    """This process's resident memory, for runs without CUDA.

    Resident memory and its peak come from the kernel, bytes in use and free chunks from malloc
    where that can tell. Python's own small objects are in neither.
    """

    name, device_type = "process", "cpu"

    def __init__(self) -> None:
        self._status = self._open("/proc/self/status", os.O_RDONLY)
        self._clear = self._open("/proc/self/clear_refs", os.O_WRONLY)
        self._pid = os.getpid()
        self._heap = (
            getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
        )
        if self._heap is not None:
            self._heap.restype = _HeapInfo
        self._inactive = 0

    @staticmethod
    def _open(path: str, flags: int) -> int | None:
        """None where the system has no such file or a sandbox forbids it."""
        return (
            os.open(path, flags)
            if os.access(path, os.R_OK if flags == os.O_RDONLY else os.W_OK)
            else None
        )

    def _reopen_after_fork(self) -> None:
        """An inherited descriptor would show the parent's figures."""
        if os.getpid() != self._pid:
            self.close()
            self.__init__()  # type: ignore[misc]

    def read(self, thorough: bool = False) -> Sample:
        """One small read of /proc; `thorough` asks malloc too."""
        self._reopen_after_fork()
        resident, peak = self._read_resident()
        live = self._read_heap() if thorough else None
        return Sample(resident, resident, peak, peak, self._inactive, live)

    def _read_heap(self) -> int | None:
        """Bytes in use. malloc walks its free chunks: a microsecond in a young heap, milliseconds
        in an old one.
        """
        if self._heap is None:
            return None
        heap = self._heap()
        self._inactive = heap.fordblks
        return heap.uordblks + heap.hblkhd

    def _read_resident(self) -> tuple[int, int]:
        if self._status is None:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            return peak, peak
        status = os.pread(self._status, 4096, 0)
        start = status.index(b"VmHWM:") + 6
        # VmRSS is the line after it
        peak, resident = status[start : start + 100].split(b"kB", 2)[:2]
        size = int(resident.partition(b":")[2]) * 1024
        return size, max(int(peak) * 1024, size)

    def read_surroundings(self) -> Surroundings:
        """Of the machine, not of a container's share of it."""
        if not os.path.exists("/proc/meminfo"):
            return Surroundings(0, 0, 0)
        with open("/proc/meminfo") as file:
            info = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        resident = self._read_resident()[0]
        total, free = info["MemTotal"], info["MemAvailable"]
        return Surroundings(total, free, max(0, total - free - resident))

    def reset_peaks(self) -> None:
        """The kernel's own reset; where there is none, peaks stay those of the whole process."""
        if self._clear is not None:
            os.pwrite(self._clear, b"5", 0)

    def is_busy(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """Close the files."""
        for descriptor in (self._status, self._clear):
            if descriptor is not None:
                os.close(descriptor)
        self._status = self._clear = None
