"""Bytes of model state on this rank: by what they are for, and by the unit that they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .engine import Zero3Engine
from .shards import FlatGroup


def by_category(
    engine: Zero3Engine, optimizers: Sequence[Optimizer], module: nn.Module
) -> dict[str, int]:
    """Parameters, gradients, optimizer_state, slots (with the buffers of reductions) and
    buffers.
    """
    states = [v for o in optimizers for state in o.state.values() for v in state.values()]
    return {
        "parameters": sum(group.data.nbytes for group in engine.groups),
        "gradients": sum(
            group.allocated.nbytes for group in engine.groups if group.allocated is not None
        ),
        "slots": engine.arena.memory.nbytes
        + engine.reducer.buffer.nbytes
        + engine.collectives.nbytes,
        "optimizer_state": sum(v.nbytes for v in states if isinstance(v, Tensor)),
        "buffers": sum(
            t.nbytes
            for b in module.buffers()
            for t in ((b._indices(), b._values()) if b.is_sparse else (b,))
        ),
    }


def by_unit(engine: Zero3Engine, optimizers: Sequence[Optimizer]) -> dict[str, int]:
    """This rank's shards of parameters, gradients and optimizer state.

    State of optimizers that look at whole tensors is missing: it belongs to parameters that this
    rank owns, not to its shards.
    """
    states = {p: state for o in optimizers for p, state in o.state.items()}
    return {
        unit.name: sum(
            _of_piece(piece.group, piece.place.start, piece.place.stop, states)
            for chunk in unit.chunks
            for piece in chunk.owned
        )
        for unit in engine.units
    }


def _of_piece(group: FlatGroup, start: int, stop: int, states: dict[Tensor, dict[str, Any]]) -> int:
    """Elements [start, stop) of a flat group, with their gradients and state."""
    total = (stop - start) * group.data.itemsize * (1 if group.allocated is None else 2)
    for segment in group.segments:
        common = min(stop, segment.stop) - max(start, segment.start)
        for value in states.get(segment.parameter, {}).values() if common > 0 else ():
            if isinstance(value, Tensor) and value.numel() == segment.stop - segment.start:
                total += common * value.itemsize
    return total
