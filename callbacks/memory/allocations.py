"""Find the largest allocations: at the peak by the allocator's trace, else tensors alive now."""

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...strategies.engine import is_in_buffer, is_sharded
from .leaks import name_holder
from .ledger import local_part

STACK_LIMIT = 12  # frames of a stack
_PLACES = 20  # places of the trace
_KINDS = 8  # kinds of tensors alive; few, as the search for a holder walks all objects
_LIBRARIES = ("/torch/", "/lightning/", "/pytorch_lightning/", "<frozen")


@dataclass(frozen=True)
class Allocation:
    """All allocations of one place in the program."""

    size: int  # bytes
    count: int
    what: str  # the place, or the kind of tensors
    stack: tuple[str, ...] = ()  # innermost call first


def at_peak(trace: Iterable[Mapping[str, Any]]) -> tuple[int, list[Allocation]]:
    """Return (bytes, places) of the allocations alive at the highest point of the trace.

    The trace is bounded, so it lacks earlier blocks; their frees are ignored.
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
            next((line for line in stack if _is_user_code(line)), stack[0]),
            stack,
        )
        for stack, sizes in places.items()
    ]
    return sorted(found, key=lambda allocation: -allocation.size)[:_PLACES]


def format_stack(frames: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return at most `STACK_LIMIT` Python frames as text, innermost first."""
    lines = [f"{frame['name']} ({frame['filename']}:{frame['line']})" for frame in frames]
    lines = [line for line in lines if ".cpp:" not in line and "??" not in line]
    return tuple(lines[:STACK_LIMIT]) or (
        "no Python stack (made by C++, in backward or before recording)",
    )


def _is_user_code(line: str) -> bool:
    return not any(part in line for part in _LIBRARIES)


def find_allocations(source: str, device_type: str, module: nn.Module) -> list[Allocation]:
    """Find the allocations for the report: by the CUDA trace if there is one, else by tensors."""
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
    """Find the kinds of tensors alive now that take the most memory."""
    # A parameter that zero3 has sharded has no memory of its own.
    unsharded = {
        name: parameter
        for name, parameter in module.named_parameters()
        if not is_sharded(parameter)
    }
    names = {
        local_part(parameter).untyped_storage().data_ptr(): name
        for name, parameter in unsharded.items()
    }
    seen: set[int] = set()
    sizes: dict[str, list[int]] = {}
    examples: dict[str, list[torch.Tensor]] = {}
    for item in gc.get_objects():
        is_tensor = issubclass(type(item), torch.Tensor) and item.device.type == device_type
        if not is_tensor or is_sharded(item) or is_in_buffer(item):
            continue  # unsharded parameters are parts of one tensor, which counts by itself
        item = local_part(item)
        if item.layout != torch.strided or item.untyped_storage().device.type == "meta":
            continue  # `torch.export` keeps tensors without memory, which warn when they are asked
        try:
            address = item.untyped_storage().data_ptr()
        except RuntimeError:  # a tensor without memory, such as `torch.compile` keeps
            continue
        if not address or address in seen:
            continue
        seen.add(address)
        shape = f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}"
        kind = f"parameter {names[address]}, {shape}" if address in names else shape
        sizes.setdefault(kind, []).append(item.untyped_storage().nbytes())
        examples[kind] = [item]
    del item  # else the search below finds it as a holder
    largest = sorted(sizes, key=lambda kind: -sum(sizes[kind]))[:_KINDS]
    found = []
    for kind in largest:
        example = examples[kind].pop()  # so that nothing but its holder refers to it
        what = kind
        if not kind.startswith("parameter"):
            what += f", held by {name_holder(example, module)}"
        found.append(Allocation(sum(sizes[kind]), len(sizes[kind]), what))
    return found
