"""Compare the allocator's own settings with the options that we gave it.

The text that torch returns proves nothing: it is the last text that torch was given, even one that
it rejected. The typed fields of the snapshot prove an option; one without such a field is reported
as unreadable.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...strategies.support import set_allocator_settings
from .grammar import OPTIONS, Value, parse, roundup_table

MB = 2**20
# Options that can be read back, from the snapshot or by a function of torch.
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
    """The running allocator; tests replace it by a recorded one."""

    def backend(self) -> str:
        """Return `native`, `cudaMallocAsync` or `pluggable`."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """Return the allocator's own typed settings, with the keys of torch's snapshot."""
        ...

    def memory_fraction(self) -> float:
        """Return the share of the device that this process may use, 0 to 1."""
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
        """See :meth:`Allocator.backend`."""
        return torch.cuda.memory.get_allocator_backend()

    def settings(self) -> Mapping[str, Any]:
        """See :meth:`Allocator.settings`."""
        return torch.cuda.memory._snapshot(self.device)["allocator_settings"]

    def memory_fraction(self) -> float:
        """See :meth:`Allocator.memory_fraction`."""
        return torch.cuda.memory.get_per_process_memory_fraction(self.device)

    def set_memory_fraction(self, fraction: float) -> None:
        """Change the share at once, unlike the option, which torch reads when CUDA starts."""
        torch.cuda.memory.set_per_process_memory_fraction(fraction, self.device)

    def apply(self, text: str) -> None:
        """See :meth:`Allocator.apply`."""
        set_allocator_settings(text)


@dataclass(frozen=True)
class Proof:
    """The result of a comparison of options with the allocator's settings."""

    confirmed: dict[str, Any]
    wrong: dict[str, tuple[Any, Any]]  # option -> (expected, found)
    unreadable: tuple[str, ...]

    def describe(self) -> str:
        """Return one line for the log."""
        parts = [f"{name}={value}" for name, value in self.confirmed.items()]
        line = "in effect: " + (", ".join(parts) or "nothing to show")
        if self.unreadable:
            line += f"; accepted, but torch has no way to read back: {', '.join(self.unreadable)}"
        return line


def prove(options: Mapping[str, Any], allocator: Allocator) -> Proof:
    """Compare every option with the allocator's own settings."""
    backend = allocator.backend()
    # Only the native allocator has a snapshot; the driver's pool ignores all options but two.
    settings = allocator.settings() if backend == "native" else {}
    confirmed: dict[str, Any] = {}
    wrong: dict[str, tuple[Any, Any]] = {}
    unreadable = []
    for name, value in options.items():
        found = _read_option(name, backend, settings, allocator)
        expected = roundup_table(value) if name == "roundup_power2_divisions" else value
        if found is None:
            unreadable.append(name)
        elif _is_same(expected, found) or (
            isinstance(value, dict) and found == roundup_table(value, overwrite_last=True)
        ):
            confirmed[name] = value
        else:
            wrong[name] = (expected, found)
    return Proof(confirmed, wrong, tuple(unreadable))


def compare_ranks(per_rank: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a table of the settings on which ranks differ, or None where all agree."""
    names = sorted({name for rank in per_rank for name in rank})
    rows = []
    for name in names:
        values = [repr(rank.get(name, "absent")) for rank in per_rank]
        if len(set(values)) > 1:
            rows.append(
                f"  {name}: " + ", ".join(f"rank {i}: {value}" for i, value in enumerate(values))
            )
    return "\n".join(rows) or None


def undo_text(options: Mapping[str, Value], before: str, version: tuple[int, int]) -> str:
    """Return the text that undoes `options` in a running allocator whose text was `before`.

    It is `before` with explicit defaults for the other options. torch resets only some options that
    a text leaves out; the others keep their last value.
    """
    previous = parse(before, version)
    entries = [before] if before.strip() else []
    for name in options:
        default = OPTIONS[name].default
        if name not in previous and default is not None and name != "per_process_memory_fraction":
            entries.append(f"{name}:{default}")
    return ",".join(entries)


def _read_option(name: str, backend: str, settings: Mapping[str, Any], allocator: Allocator) -> Any:
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


def _is_same(expected: Any, found: Any) -> bool:
    if isinstance(expected, float):
        return abs(expected - found) < 1e-9
    return expected == found
