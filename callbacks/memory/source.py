"""Sources of memory figures: the CUDA allocator, the driver, or the process itself.

The tracker takes several samples a step, so a sample must be cheap and must not wait for the
device. All sources here read counters of the host. Sizes are bytes.
"""

import ctypes
import os
import resource
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch


class Sample(NamedTuple):
    """The memory in use now, and its peak since the last reset of the peaks."""

    allocated: int  # in tensors; of a process: resident
    reserved: int  # taken from the device; of a process: resident
    peak_allocated: int
    peak_reserved: int
    # reserved, unused, and not free for every request: split blocks, free heap chunks
    inactive: int
    # bytes that a leak increases: allocated; of a process bytes in use by malloc, None if not read
    live: int | None
    graph_pool: int = 0  # reserved by the private pools of CUDA graphs
    retries: int = 0  # times that the allocator emptied its cache since the process started
    ooms: int = 0  # out-of-memory errors, caught ones too

    @property
    def waste(self) -> int:
        """The bytes that are reserved and unused, without graph pools.

        The blocks of graph pools look unused between replays.
        """
        # Of a process all resident bytes are in use, except for free chunks of the heap.
        if self.reserved == self.allocated:
            return min(self.inactive, self.reserved)
        return max(0, self.reserved - self.graph_pool - self.allocated)

    @property
    def fragmentation(self) -> float:
        """The share of reserved memory that is unused, 0 to 1."""
        return self.waste / self.reserved if self.reserved else 0.0


class Surroundings(NamedTuple):
    """Figures that cost more to read; the tracker reads them on logging steps."""

    capacity: int  # of the device, or of the machine
    free: int  # for any process
    outside: int  # used by other processes, by the CUDA context and by NCCL
    pinned_allocated: int = 0
    pinned_reserved: int = 0


class MemorySource(Protocol):
    """A source of the memory figures of a device."""

    name: str  # its name in log lines and figures: "cuda", "driver" or "process"
    device_type: str  # device type of the tensors that it counts

    def read(self, thorough: bool = False) -> Sample:
        """Read the figures, without waiting for the device; `thorough` adds slower ones."""
        ...

    def read_surroundings(self) -> Surroundings:
        """Read the figures that cost more."""
        ...

    def reset_peaks(self) -> None:
        """Reset the peaks to the memory in use now."""
        ...

    def is_busy(self) -> bool:
        """Say whether a CUDA graph is being captured, so that nobody may ask the device now."""
        ...

    def close(self) -> None:
        """Give back the files of the source; nobody reads it afterwards."""
        ...


def choose_source(device: torch.device) -> MemorySource:
    """Return the source for a run on this device."""
    if device.type != "cuda":
        return ProcessSource()
    if torch.cuda.memory.get_allocator_backend() in ("native", "cudaMallocAsync"):
        return CUDASource(device)
    return DriverSource(device)


def sample_from_stats(stats: Mapping[str, Any]) -> Sample:
    """Make a sample of `torch.cuda.memory_stats_as_nested_dict`; a missing key counts as 0."""
    allocated, reserved = _totals(stats, "allocated_bytes"), _totals(stats, "reserved_bytes")
    return Sample(
        allocated=allocated["current"],
        reserved=reserved["current"],
        peak_allocated=allocated["peak"],
        peak_reserved=reserved["peak"],
        inactive=_totals(stats, "inactive_split_bytes")["current"],
        live=allocated["current"],
        graph_pool=_sum_current(stats.get("reserved_bytes_by_private_pools", 0)),
        retries=stats.get("num_alloc_retries", 0),
        ooms=stats.get("num_ooms", 0),
    )


def _totals(stats: Mapping[str, Any], name: str) -> Mapping[str, int]:
    return stats.get(name, {}).get("all", {"current": 0, "peak": 0})


def _sum_current(node: Any) -> int:
    """Sum the current bytes of all pools, however deep the pools are nested."""
    if isinstance(node, Mapping):
        if "all" in node:
            return node["all"]["current"]
        return sum(_sum_current(child) for child in node.values())
    return int(node)


class CUDASource:
    """torch's allocator on one device."""

    name, device_type = "cuda", "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def read(self, thorough: bool = False) -> Sample:
        """Read all figures by one call.

        `torch.cuda.memory_allocated` and its like would each build and sort all of them.
        """
        return sample_from_stats(torch.cuda.memory_stats_as_nested_dict(self.device))

    def read_surroundings(self) -> Surroundings:
        """Read the driver's figures, too, which does not wait for kernels either."""
        free, total = torch.cuda.mem_get_info(self.device)
        reserved = _totals(torch.cuda.memory_stats_as_nested_dict(self.device), "reserved_bytes")[
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
        """Reset the peaks of the process; other readers of the peaks see the reset, too."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def is_busy(self) -> bool:
        """Say whether the stream is captured: a call of the allocator may invalidate a capture."""
        return torch.cuda.is_current_stream_capturing()

    def close(self) -> None:
        """Do nothing, as the source has no files."""


class DriverSource(CUDASource):
    """The memory in use on the whole device, for a pluggable allocator, which keeps no figures."""

    name = "driver"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._peak = 0

    def read(self, thorough: bool = False) -> Sample:
        """Read the driver; peaks are the largest samples, and miss any peak between two samples."""
        free, total = torch.cuda.mem_get_info(self.device)
        used = total - free
        self._peak = max(self._peak, used)
        return Sample(used, used, self._peak, self._peak, inactive=0, live=used)

    def read_surroundings(self) -> Surroundings:
        """Read the driver, which does not tell this process's use from that of others."""
        free, total = torch.cuda.mem_get_info(self.device)
        return Surroundings(capacity=total, free=free, outside=0)

    def reset_peaks(self) -> None:
        """Let the peak start again at the next sample."""
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

    Resident memory and its peak come from the kernel; bytes in use and free chunks come from malloc
    where it has `mallinfo2`, without Python's own small objects.
    """

    name, device_type = "process", "cpu"

    def __init__(self) -> None:
        self._status_file = self._open_if_allowed("/proc/self/status", os.O_RDONLY)
        self._clear_file = self._open_if_allowed("/proc/self/clear_refs", os.O_WRONLY)
        self._pid = os.getpid()
        self._mallinfo = (
            getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
        )
        if self._mallinfo is not None:
            self._mallinfo.restype = _HeapInfo
        self._inactive = 0

    @staticmethod
    def _open_if_allowed(path: str, flags: int) -> int | None:
        """Open a file; return None where the system has none or a sandbox forbids it."""
        mode = os.R_OK if flags == os.O_RDONLY else os.W_OK
        return os.open(path, flags) if os.access(path, mode) else None

    def _reopen_after_fork(self) -> None:
        """Open the files again in a forked process, where they show the parent's figures."""
        if os.getpid() != self._pid:
            self.close()
            self.__init__()  # type: ignore[misc]

    def read(self, thorough: bool = False) -> Sample:
        """Read a small file in /proc; `thorough` asks malloc, too."""
        self._reopen_after_fork()
        resident, peak = self._read_resident()
        live = self._read_heap() if thorough else None
        return Sample(resident, resident, peak, peak, self._inactive, live)

    def _read_heap(self) -> int | None:
        """Return malloc's bytes in use; None where malloc does not count them.

        malloc walks its free chunks: a microsecond in a young heap, milliseconds in an old one.
        """
        if self._mallinfo is None:
            return None
        heap = self._mallinfo()
        self._inactive = heap.fordblks
        return heap.uordblks + heap.hblkhd

    def _read_resident(self) -> tuple[int, int]:
        if self._status_file is None:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            return peak, peak
        status = os.pread(self._status_file, 4096, 0)
        start = status.index(b"VmHWM:") + 6
        # The line after VmHWM has VmRSS.
        highest, resident = status[start : start + 100].split(b"kB", 2)[:2]
        size = int(resident.partition(b":")[2]) * 1024
        return size, max(int(highest) * 1024, size)

    def read_surroundings(self) -> Surroundings:
        """Read the memory of the machine, not of a container's share of it."""
        if not os.path.exists("/proc/meminfo"):
            return Surroundings(0, 0, 0)
        with open("/proc/meminfo") as file:
            info = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        resident = self._read_resident()[0]
        total, free = info["MemTotal"], info["MemAvailable"]
        return Surroundings(total, free, max(0, total - free - resident))

    def reset_peaks(self) -> None:
        """Reset the kernel's peak; where it has no reset, peaks stay those of the whole process."""
        if self._clear_file is not None:
            os.pwrite(self._clear_file, b"5", 0)

    def is_busy(self) -> bool:
        """Return False: a process can always be read."""
        return False

    def close(self) -> None:
        """Close the files."""
        for descriptor in (self._status_file, self._clear_file):
            if descriptor is not None:
                os.close(descriptor)
        self._status_file = self._clear_file = None
