"""What the allocator itself says its settings are, compared with what was asked for.

The text torch returns proves nothing: it is the last one handed in, even one it rejected. Proof is
in the typed fields of the snapshot; options without such a field are reported as unreadable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .grammar import OPTIONS, Value, parse, roundup_table

MB = 2**20
# Options the snapshot shows, with torch's defaults as it shows them.
READABLE = (
    "max_split_size_mb",
    "garbage_collection_threshold",
    "expandable_segments",
    "roundup_power2_divisions",
    "pinned_num_register_threads",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "graph_capture_record_stream_reuse",
    "per_process_memory_fraction",
    "backend",
)


class Allocator(Protocol):
    """The running allocator; tests put a recorded one in its place."""

    def backend(self) -> str:
        """`native`, `cudaMallocAsync` or `pluggable`."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """The allocator's own typed settings, with the keys of torch's snapshot."""
        ...

    def memory_fraction(self) -> float:
        """Share of the device this process may use."""
        ...

    def set_memory_fraction(self, fraction: float) -> None:
        """Change that share at once."""
        ...

    def apply(self, text: str) -> None:
        """Hand a whole configuration to the running allocator."""
        ...


class CUDAAllocator:
    """torch's allocator on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def backend(self) -> str:
        """`native`, `cudaMallocAsync` or `pluggable`."""
        return torch.cuda.memory.get_allocator_backend()

    def settings(self) -> Mapping[str, Any]:
        """The allocator's own typed settings."""
        return torch.cuda.memory._snapshot(self.device)["allocator_settings"]

    def memory_fraction(self) -> float:
        """Share of the device this process may use."""
        return torch.cuda.memory.get_per_process_memory_fraction(self.device)

    def set_memory_fraction(self, fraction: float) -> None:
        """Takes effect at once, unlike the option of the same name."""
        torch.cuda.memory.set_per_process_memory_fraction(fraction, self.device)

    def apply(self, text: str) -> None:
        """Hand a whole configuration to the running allocator."""
        torch._C._accelerator_setAllocatorSettings(text)


@dataclass(frozen=True)
class Proof:
    """What was found: options confirmed, those that differ, and those torch does not show."""

    confirmed: dict[str, Any]
    wrong: dict[str, tuple[Any, Any]]  # option -> (asked for, found)
    unreadable: tuple[str, ...]

    def describe(self) -> str:
        """One line for the log."""
        parts = [f"{name}={value}" for name, value in self.confirmed.items()]
        line = "in effect: " + (", ".join(parts) or "nothing to show")
        if self.unreadable:
            line += f"; accepted, but torch has no way to read back: {', '.join(self.unreadable)}"
        return line


def prove(asked: Mapping[str, Value], allocator: Allocator) -> Proof:
    """Compare every asked option with what the allocator says."""
    backend = allocator.backend()
    # Only the native allocator has a snapshot; the driver's pool ignores all options but two.
    settings = allocator.settings() if backend == "native" else {}
    confirmed: dict[str, Any] = {}
    wrong: dict[str, tuple[Any, Any]] = {}
    unreadable = []
    for name, value in asked.items():
        found = _read(name, backend, settings, allocator)
        expected = roundup_table(value) if name == "roundup_power2_divisions" else value
        if found is None:
            unreadable.append(name)
        elif _same(expected, found) or (
            isinstance(value, dict) and found == roundup_table(value, overwrite_last=True)
        ):
            confirmed[name] = value
        else:
            wrong[name] = (expected, found)
    return Proof(confirmed, wrong, tuple(unreadable))


def compare_ranks(per_rank: Sequence[Mapping[str, Any]]) -> str | None:
    """A table of the settings on which ranks differ, or None where all agree."""
    names = sorted({name for rank in per_rank for name in rank})
    rows = []
    for name in names:
        values = [repr(rank.get(name, "absent")) for rank in per_rank]
        if len(set(values)) > 1:
            rows.append(
                f"  {name}: " + ", ".join(f"rank {i}: {value}" for i, value in enumerate(values))
            )
    return "\n".join(rows) or None


def undo_text(asked: Mapping[str, Value], before: str, version: tuple[int, int]) -> str:
    """The text that puts a running allocator back to `before`: what was there, plus explicit
    defaults.

    torch resets only some options when they are left out; the others keep their last value, so
    leaving them out would not undo them.
    """
    previous = parse(before, version)
    entries = [before] if before.strip() else []
    for name in asked:
        default = OPTIONS[name].default
        if name not in previous and default is not None and name != "per_process_memory_fraction":
            entries.append(f"{name}:{default}")
    return ",".join(entries)


def _read(name: str, backend: str, settings: Mapping[str, Any], allocator: Allocator) -> Any:
    if name == "backend":
        return backend
    if name == "per_process_memory_fraction":
        return allocator.memory_fraction()
    if name == "max_split_size_mb" and "max_split_size" in settings:
        return settings["max_split_size"] / MB
    if name not in READABLE or name not in settings:
        return None
    if name == "roundup_power2_divisions":
        table = settings[name]
        return tuple(table[str(2**power)] for power in range(len(table)))
    return settings[name]


def _same(expected: Any, found: Any) -> bool:
    if isinstance(expected, float):
        return abs(expected - found) < 1e-9
    return expected == found
