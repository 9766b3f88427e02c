"""After an out-of-memory error: the numbers a person needs, a snapshot, and what to try.

Everything here works on one rank alone. The others are still inside their collectives, so asking
them anything would turn the error into a hang. Nothing is swallowed: the error goes on, with the
report attached; when the report itself fails, that is logged with its own traceback.
"""

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .charts import size_text
from .source import Sample, Surroundings

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_CUDA_WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|B|KiB|MiB|GiB)")
_CPU_WANTED = re.compile(r"you tried to allocate (\d+) bytes")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that device or host memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(
        error
    )


def parse_wanted(error: BaseException) -> int | None:
    """Bytes of the failed request, as far as the message tells (CUDA rounds to two decimals)."""
    text = str(error)
    if found := _CUDA_WANTED.search(text):
        return int(float(found.group(1)) * _UNITS[found.group(2)])
    if found := _CPU_WANTED.search(text):
        return int(found.group(1))
    return None


def find_unit(error: BaseException, module: nn.Module) -> str | None:
    """The innermost submodule that was running, from the error's own traceback; None in
    backward.
    """
    names = {id(child): name for name, child in module.named_modules() if name}
    found = None
    for frame in _frames(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
    return found


def _frames(traceback: types.TracebackType | None) -> Iterator[types.FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def largest_free_block(snapshot: Mapping[str, Any], device: int) -> int:
    """The largest request the cache could serve without asking the driver."""
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
    """The figures at the moment of the error; bytes, None where they cannot be known."""

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
    expandable: bool = False

    @property
    def is_fragmented(self) -> bool:
        """The request would have fitted into what is reserved and unused, were it in one piece."""
        return (
            self.source == "cuda" and self.wanted is not None and self.wanted <= self.sample.waste
        )

    def describe(self) -> str:
        """The message: numbers first, then what to try."""
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
        """From the figures, the likeliest remedy first."""
        advice = []
        if self.is_fragmented:
            what = "rounding sizes, AllocatorConfig(roundup_power2_divisions=8)"
            if not self.expandable:
                what = "AllocatorConfig(expandable_segments=True)"
            advice.append(f"{what}: enough memory is reserved and unused, but in pieces too small")
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
                "slots": "fewer or smaller communication buffers",
                "buffers": "smaller buffers, or keep them on the host",
            }.get(largest, "a smaller batch")
            + f" (most memory is {largest})"
        )
        if not self.is_fragmented and self.source == "cuda":
            advice.append("no allocator option: the memory is really in use")
        return advice


def add_snapshot(report: OutOfMemory, folder: Path) -> None:
    """What only torch's own allocator on a GPU can add: block sizes and the dump."""
    snapshot = torch.cuda.memory._snapshot()
    report.largest_free = largest_free_block(snapshot, torch.cuda.current_device())
    report.expandable = bool(snapshot.get("allocator_settings", {}).get("expandable_segments"))
    report.snapshot_path = write_snapshot(folder, report.rank, report.step)


def write_snapshot(folder: Path, rank: int, step: int) -> Path:
    """Dump the allocator's state, with stacks where history was recorded; bounded by that
    history.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"oom_rank{rank}_step{step}.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    return path


# torch never lets an observer go, so one is attached per process and finds the tracker of the day.
_listeners: list[Any] = []


def attach_observer(listener: Any) -> None:
    """Call `listener(device, wanted, limit, free)` (a bound method, held weakly) on every
    out-of-memory error.
    """
    import weakref

    first = not _listeners
    _listeners[:] = [weakref.WeakMethod(listener)]
    if first:
        torch._C._cuda_attach_out_of_memory_observer(_dispatch)


def _dispatch(device: int, wanted: int, limit: int, free: int) -> None:
    for reference in _listeners:
        if (listener := reference()) is not None:
            listener(device, wanted, limit, free)
