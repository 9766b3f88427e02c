"""Full checkpoints: optimizer state in torch's own layout, from and to the flat shards.

A full optimizer state is what ``torch.optim.Optimizer.state_dict()`` would be on one device: parameters numbered in the order
in which the user passed them, every tensor in its parameter's shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .engine import Zero3Engine
from .engine.shards import FlatGroup, Segment


def full_optimizer_state(engine: Zero3Engine, index: int, optimizer: Optimizer) -> dict[str, Any]:
    """State of optimizer ``index`` in torch's layout, on the CPU of rank 0; an empty dict elsewhere. Collective."""
    names = engine.optimizer_names[index]
    numbers = {name: k for k, name in enumerate(n for group in names for n in group)}
    groups = [f for f in engine.groups if f.key.optimizer == index]
    state: dict[int, dict[str, Any]] = {}
    scalars = _gather_scalars(engine, groups, optimizer)
    for key, dtype in _tensor_keys(engine, groups, optimizer):
        flats = {group: _flat_state(group, optimizer, key, dtype) for group in groups}
        for unit in engine.units:
            if not unit.trained:
                continue
            values = unit.full(lambda group: flats.get(group), dtype)  # noqa: B023 (called at once)
            if engine.collectives.rank == 0:
                for name in values.keys() & scalars.keys():
                    state.setdefault(numbers[name], {})[key] = values[name].cpu().clone()
    if engine.collectives.rank:
        return {}
    for name, items in scalars.items():
        state.setdefault(numbers[name], {}).update(items)
    counter = iter(range(len(numbers)))
    packed = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [next(counter) for _ in members]}
        for group, members in zip(optimizer.param_groups, names, strict=True)
    ]
    return {"state": dict(sorted(state.items())), "param_groups": packed}


def load_full_optimizer_state(engine: Zero3Engine, index: int, optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Take this rank's part of a full optimizer state; local.

    Raises:
        ValueError: the saved groups do not fit the optimizer's, or a saved tensor does not fit its parameter.
    """
    names = engine.optimizer_names[index]
    if [len(g["params"]) for g in saved["param_groups"]] != [len(g) for g in names]:
        raise ValueError(
            f"Optimizer {index} was saved with param groups of {[len(g['params']) for g in saved['param_groups']]} parameters, "
            f"but has groups of {[len(g) for g in names]}. Build the optimizer as in the saved run."
        )
    by_name: dict[str, dict[str, Any]] = {}
    for group, stored, members in zip(optimizer.param_groups, saved["param_groups"], names, strict=True):
        group.update({k: v for k, v in stored.items() if k != "params"})
        by_name.update({n: saved["state"][k] for n, k in zip(members, stored["params"], strict=True) if k in saved["state"]})
    optimizer.state.clear()
    for flat in engine.groups:
        if flat.key.optimizer == index:
            _load_group(engine, flat, optimizer, by_name)


def take_over_state(engine: Zero3Engine, index: int, optimizer: Optimizer, state: dict[str, dict[str, Any]]) -> None:
    """Shard state that the optimizer created with its parameters (Adagrad does), by parameter name; local."""
    optimizer.state.clear()
    for flat in engine.groups:
        if flat.key.optimizer == index:
            _load_group(engine, flat, optimizer, state)


def _load_group(engine: Zero3Engine, flat: FlatGroup, optimizer: Optimizer, by_name: dict[str, dict[str, Any]]) -> None:
    owned = sorted(engine.gradients.owned_spans(flat), key=lambda item: item[1])
    items = [(entry, start, span, by_name.get(entry.name)) for entry, start, span in owned]
    # Parameters with the same scalars (step counts) share a segment; the others need one of their own.
    signatures = [(start, _signature(state)) for _, start, _, state in items]
    flat.cut([start for (start, mark), (_, before) in zip(signatures[1:], signatures, strict=False) if mark != before])
    for segment in flat.segments:
        inside = [item for item in items if segment.start <= item[1] < segment.stop]
        if inside and inside[0][3] is not None:
            optimizer.state[segment.parameter] = _segment_state(flat, segment, inside, optimizer)


def _signature(state: dict[str, Any] | None) -> Any:
    if state is None:
        return None
    return tuple((k, float(v) if isinstance(v, Tensor) else v) for k, v in sorted(state.items()) if not _elementwise(v))


def _elementwise(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _segment_state(flat: FlatGroup, segment: Segment, inside: list[tuple], optimizer: Optimizer) -> dict[str, Any]:
    # Dtypes and devices as `Optimizer.load_state_dict` chooses them.
    group = optimizer.param_groups[flat.key.group]
    steps_on_device = group.get("fused") or group.get("capturable")
    result: dict[str, Any] = {}
    for key, value in inside[0][3].items():
        if not _elementwise(value):
            device = flat.data.device if steps_on_device or key != "step" else "cpu"
            result[key] = value.to(device, copy=True) if isinstance(value, Tensor) else value
            continue
        dtype = flat.data.dtype if flat.data.is_floating_point() and value.is_floating_point() else value.dtype
        target = torch.zeros(segment.stop - segment.start, dtype=dtype, device=flat.data.device)
        for entry, start, span, state in inside:
            source = state[key]
            if source.shape != entry.size and source.numel() != entry.size.numel():
                raise ValueError(
                    f"Optimizer state {key!r} of parameter {entry.name!r} has shape {tuple(source.shape)}, the parameter has "
                    f"{tuple(entry.size)}."
                )
            target[start - segment.start :][: span.stop - span.start].copy_(entry.flatten(source)[span.start : span.stop])
        result[key] = target
    return result


def _segments_with_state(group: FlatGroup, optimizer: Optimizer) -> Iterator[tuple[Segment, dict[str, Any]]]:
    for segment in group.segments:
        if segment.parameter in optimizer.state:
            yield segment, optimizer.state[segment.parameter]


def _tensor_keys(engine: Zero3Engine, groups: list[FlatGroup], optimizer: Optimizer) -> list[tuple[str, torch.dtype]]:
    """Elementwise state of any rank: one rank may own nothing of a group, and all must gather alike."""
    mine = {
        (key, value.dtype)
        for group in groups
        for _, state in _segments_with_state(group, optimizer)
        for key, value in state.items()
        if _elementwise(value)
    }
    everyone = set().union(*engine.collectives.all_gather_object(mine))
    return sorted(everyone, key=str)


def _flat_state(group: FlatGroup, optimizer: Optimizer, key: str, dtype: torch.dtype) -> Tensor:
    flat = torch.zeros(group.numel, dtype=dtype, device=group.data.device)
    for segment, state in _segments_with_state(group, optimizer):
        if isinstance(state.get(key), Tensor):
            segment.view(flat).copy_(state[key])
    return flat


def _gather_scalars(engine: Zero3Engine, groups: list[FlatGroup], optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Name -> the state that is not elementwise, of every parameter that has state on any rank."""
    mine: dict[str, dict[str, Any]] = {}
    for group in groups:
        spans = engine.gradients.owned_spans(group)
        for segment, state in _segments_with_state(group, optimizer):
            scalars = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items() if not _elementwise(v)}
            for entry, start, _ in spans:
                if segment.start <= start < segment.stop:
                    mine[entry.name] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in scalars.items()}
    merged: dict[str, dict[str, Any]] = {}
    for theirs in engine.collectives.all_gather_object(mine):
        for name, scalars in theirs.items():
            merged.setdefault(name, scalars)
    return merged
