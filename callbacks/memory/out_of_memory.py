"""Report an out-of-memory error: the figures, a snapshot, and remedies.

Everything here works on one rank alone. hazard: the other ranks are still inside of their
collectives, so an exchange with them would turn the error into a hang. The error goes on, with the
report attached; if the report itself fails, the tracker logs that failure with its traceback.
"""

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...strategies.support import attach_out_of_memory_observer
from .charts import size_text
from .source import Sample, Surroundings

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_CUDA_WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|B|KiB|MiB|GiB)")
_CPU_WANTED = re.compile(r"you tried to allocate (\d+) bytes")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether the error means that device or host memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(
        error
    )


def parse_wanted(error: BaseException) -> int | None:
    """Return the bytes of the failed request, or None; CUDA's message rounds to two decimals."""
    text = str(error)
    if found := _CUDA_WANTED.search(text):
        return int(float(found.group(1)) * _UNITS[found.group(2)])
    if found := _CPU_WANTED.search(text):
        return int(found.group(1))
    return None


def find_unit(error: BaseException, module: nn.Module) -> str | None:
    """Return the name of the innermost submodule in the error's traceback; None in backward."""
    names = {id(child): name for name, child in module.named_modules() if name}
    found = None
    for frame in _iterate_frames(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
    return found


def _iterate_frames(traceback: types.TracebackType | None) -> Iterator[types.FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def largest_free_block(snapshot: Mapping[str, Any], device: int) -> int:
    """Return the bytes of the largest request that the cache could serve without the driver."""
    sizes = [
        block["size"]
        for segment in snapshot.get("segments", ())
        if segment.get("device", device) == device
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    return max(sizes, default=0)


@dataclass
class OutOfMemory:
    """The figures at the moment of the error, in bytes; None where nobody knows them."""

    rank: int
    step: int
    phase: str
    unit: str | None
    source: str
    wanted: int | None
    sample: Sample
    surroundings: Surroundings
    largest_free: int | None
    categories: Mapping[str, int]
    snapshot_path: Path | None = None
    expandable: bool = False  # the allocator has expandable segments

    @property
    def is_fragmented(self) -> bool:
        """Whether the reserved and unused bytes would serve the request if they were one block."""
        return (
            self.source == "cuda" and self.wanted is not None and self.wanted <= self.sample.waste
        )

    def describe(self) -> str:
        """Return the message: figures first, then remedies."""
        where = f"rank {self.rank}, step {self.step}, {self.phase}" + (
            f", in {self.unit}" if self.unit else ""
        )
        lines = [f"Out of {'GPU' if self.source != 'process' else 'host'} memory on {where}"]
        figures = {
            "wanted": self.wanted,
            (
                "free on the device" if self.source != "process" else "free on the machine"
            ): self.surroundings.free,
            (
                "in use by tensors" if self.source != "process" else "resident in this process"
            ): self.sample.allocated,
            "reserved but unused": self.sample.waste,
            "largest free block": self.largest_free,
            "used by others": self.surroundings.outside,
            "capacity": self.surroundings.capacity,
        }
        lines += [f"  {name:<26}{size_text(size)}" for name, size in figures.items()]
        largest = sorted(self.categories.items(), key=lambda item: -item[1])[:3]
        lines.append(
            "  largest categories        " + ", ".join(f"{k} {size_text(v)}" for k, v in largest)
        )
        if self.snapshot_path is not None:
            lines.append(
                f"  snapshot                  {self.snapshot_path} (open it at"
                " https://pytorch.org/memory_viz)"
            )
        return "\n".join([*lines, "What to try:", *(f"  - {advice}" for advice in self.advise())])

    def advise(self) -> list[str]:
        """Derive remedies from the figures, the likeliest first."""
        advice = []
        if self.is_fragmented:
            remedy = "rounding sizes, AllocatorConfig(roundup_power2_divisions=8)"
            if not self.expandable:
                remedy = "AllocatorConfig(expandable_segments=True)"
            advice.append(
                f"{remedy}: enough memory is reserved and unused, but in pieces too small"
            )
        if self.surroundings.outside > 0.1 * self.surroundings.capacity and self.source == "cuda":
            advice.append(
                f"look for other processes on this GPU: {size_text(self.surroundings.outside)} is"
                " not ours"
            )
        largest = max(
            self.categories, key=lambda name: self.categories[name], default="activations"
        )
        advice.append(
            {
                "activations": (
                    "activation checkpointing, a smaller batch with accumulate_grad_batches, or"
                    " lower precision"
                ),
                "optimizer_state": (
                    "more ranks with a sharding strategy, or an optimizer with less state"
                ),
                "parameters": (
                    "more ranks with a sharding strategy, or parameters in lower precision"
                ),
                "gradients": "more ranks with a sharding strategy",
                "unsharded_units": "smaller units (`unit_policy`)",
                "reduce_buffer": "smaller units, or no `reduce_once`",
                "buffers": "smaller buffers, or keep them on the host",
            }.get(largest, "a smaller batch")
            + f" (most memory is {largest})"
        )
        if not self.is_fragmented and self.source == "cuda":
            advice.append("no allocator option: the memory is really in use")
        return advice


def add_snapshot(report: OutOfMemory, folder: Path) -> None:
    """Add block sizes and a dump to the report; needs torch's own allocator on a GPU."""
    snapshot = torch.cuda.memory._snapshot()
    report.largest_free = largest_free_block(snapshot, torch.cuda.current_device())
    report.expandable = bool(snapshot.get("allocator_settings", {}).get("expandable_segments"))
    report.snapshot_path = write_snapshot(folder, report.rank, report.step)


def write_snapshot(folder: Path, rank: int, step: int) -> Path:
    """Dump the allocator's state to a file, and return its path.

    The file has stacks if torch recorded the history of allocations; the history bounds its size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"oom_rank{rank}_step{step}.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    return path


# torch cannot detach an observer. So a process attaches one, which calls the newest listener.
_listeners: list[Any] = []


def attach_observer(listener: Any) -> None:
    """Call `listener(device, wanted, limit, free)` on every out-of-memory error.

    Sizes are bytes. The listener is a bound method, to which only a weak reference is kept; it
    replaces the one before it.
    """
    import weakref

    is_first = not _listeners
    _listeners[:] = [weakref.WeakMethod(listener)]
    if is_first:
        attach_out_of_memory_observer(_call_listeners)


def _call_listeners(device: int, wanted: int, limit: int, free: int) -> None:
    for reference in _listeners:
        if (listener := reference()) is not None:
            listener(device, wanted, limit, free)
