"""Gradients that wait for the rest of an accumulation window: part of a checkpoint that is made in
the middle of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ..engine import Zero3Engine, compare_notes
from ..engine.shards import FlatGroup
from .slices import Place, SavedTensor, SlicedTensor, places


def sliced_gradients(engine: Zero3Engine) -> dict[str, SlicedTensor]:
    """A slice of each gradient, by parameter name; collective.

    Raises:
        RuntimeError: an exception left some incomplete.
        DivergenceError: each rank has assigned others to a parameter, which is named.
    """
    engine.adopt_gradients()
    engine.gradients.require_complete(engine.groups)
    compare_notes(engine.collectives, engine.gradients.assigned_sums())
    return {
        name: _slice(engine, place)
        for name, place in _trained(engine)
        if engine.gradients.has_gradient(place.entry)
    }


def load_gradients(
    engine: Zero3Engine, saved: Mapping[str, Tensor]
) -> list[tuple[SavedTensor, SlicedTensor]]:
    """Let the next backward add to saved gradients; local.

    Args:
        engine: holds the shards.
        saved: whole gradients by parameter name. Tensors may be a :class:`~.slices.SavedTensor`.

    Returns:
        what is to be read where.
    """
    reads = []
    for name, place in _trained(engine):
        if name in saved:
            engine.gradients.mark_gradient(place.entry, True)
            value, target = saved[name], _slice(engine, place)
            if isinstance(value, SavedTensor):
                reads.append((value, target))
            else:
                target.fill(value)
    engine.gradients.adopt()
    return reads


def _trained(engine: Zero3Engine) -> Iterator[tuple[str, Place]]:
    return (
        (name, place)
        for name, place in places(engine).items()
        if place.entry.trained and place.entry.size.numel()
    )


def _slice(engine: Zero3Engine, place: Place) -> SlicedTensor:
    return place.slice_of(_gradient, place.entry.dtype, engine.device)


def _gradient(group: FlatGroup) -> Tensor | None:
    return group.grad
