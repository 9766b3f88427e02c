"""The largest allocations: at the peak from the allocator's own trace, else the tensors alive
now.
"""

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...strategies.engine import is_gathered, is_sharded
from .leaks import name_holder
from .ledger import local_part

STACK_LIMIT = 12  # frames shown
_PLACES = 20  # of the trace
_KINDS = 8  # of tensors alive: to find a holder walks all objects
_SKIPPED = ("/torch/", "/lightning/", "/pytorch_lightning/", "<frozen")


@dataclass(frozen=True)
class Allocation:
    """Allocations of one place in the program, together."""

    size: int  # bytes
    count: int
    what: str
    stack: tuple[str, ...] = ()  # innermost call first


def at_peak(trace: Iterable[Mapping[str, Any]]) -> tuple[int, list[Allocation]]:
    """(bytes, places): what was allocated within the trace and alive when that was the most.

    The trace is bounded, so blocks from before it are missing; their frees are recognised and
    ignored.
    """
    events = list(trace)
    live: dict[int, Mapping[str, Any]] = {}
    now = best = best_at = 0
    for position, event in enumerate(events):
        if event["action"] == "alloc":
            live[event["addr"]] = event
            now += event["size"]
        elif event["action"] == "free_completed" and (freed := live.pop(event["addr"], None)):
            now -= freed["size"]
        if now > best:
            best, best_at = now, position
    live.clear()
    for event in events[: best_at + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    return best, _by_stack(live.values())


def _by_stack(events: Iterable[Mapping[str, Any]]) -> list[Allocation]:
    places: dict[tuple[str, ...], list[int]] = {}
    for event in events:
        places.setdefault(format_stack(event.get("frames", ())), []).append(event["size"])
    found = [
        Allocation(
            sum(sizes),
            len(sizes),
            next((line for line in stack if _is_users(line)), stack[0]),
            stack,
        )
        for stack, sizes in places.items()
    ]
    return sorted(found, key=lambda allocation: -allocation.size)[:_PLACES]


def format_stack(frames: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Python frames, innermost first; frames of libraries only up to the user's own code."""
    lines = [f"{frame['name']} ({frame['filename']}:{frame['line']})" for frame in frames]
    lines = [line for line in lines if ".cpp:" not in line and "??" not in line]
    return tuple(lines[:STACK_LIMIT]) or (
        "no Python stack (made by C++, in backward or before recording)",
    )


def _is_users(line: str) -> bool:
    return not any(part in line for part in _SKIPPED)


def find_allocations(source: str, device_type: str, module: nn.Module) -> list[Allocation]:
    """For the report; from the CUDA trace where it was recorded."""
    if (
        source == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.memory.get_allocator_backend() == "native"
    ):
        traces = torch.cuda.memory._snapshot()["device_traces"]
        trace = traces[torch.cuda.current_device()] if traces else []
        if trace:
            return at_peak(trace)[1]
    return _largest_tensors(device_type, module)


def _largest_tensors(device_type: str, module: nn.Module) -> list[Allocation]:
    """Tensors alive now, by kind."""
    # A parameter that zero3 shards has no memory of its own.
    whole = {
        name: parameter
        for name, parameter in module.named_parameters()
        if not is_sharded(parameter)
    }
    names = {
        local_part(parameter).untyped_storage().data_ptr(): name
        for name, parameter in whole.items()
    }
    seen: set[int] = set()
    sizes: dict[str, list[int]] = {}
    examples: dict[str, list[torch.Tensor]] = {}
    for item in gc.get_objects():
        if not (
            issubclass(type(item), torch.Tensor) and item.device.type == device_type
        ) or is_gathered(item):
            continue  # slots are parts of one tensor
        item = local_part(item)
        if item.layout != torch.strided:
            continue
        try:
            address = item.untyped_storage().data_ptr()
        except RuntimeError:  # of those without memory that `torch.compile` keeps
            continue
        if not address or address in seen:
            continue
        seen.add(address)
        shape = f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
        kind = f"parameter {names[address]}, {shape}" if address in names else shape
        sizes.setdefault(kind, []).append(item.untyped_storage().nbytes())
        examples[kind] = [item]
    del item
    largest = sorted(sizes, key=lambda kind: -sum(sizes[kind]))[:_KINDS]
    found = []
    for kind in largest:
        example = examples[kind].pop()  # so that nothing but its holder refers to it
        held = "" if kind.startswith("parameter") else f", held by {name_holder(example, module)}"
        found.append(Allocation(sum(sizes[kind]), len(sizes[kind]), f"{kind}{held}"))
    return found
