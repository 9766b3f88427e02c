"""Gradients of an unfinished accumulation window, for a checkpoint made in the middle of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ..engine import Zero3Engine, compare_notes
from .collective_errors import run_on_all_ranks
from .slices import Place, SlicedTensor, places_by_name


def sliced_gradients(engine: Zero3Engine) -> dict[str, SlicedTensor]:
    """Return a slice of each gradient, by parameter name; collective.

    Raises:
        RuntimeError: an exception left some gradients incomplete.
        DivergenceError: ranks assigned different gradients to a parameter, which the error names.
    """
    engine.adopt_gradients()
    engine.gradients.require_complete(engine.gradients.trained)
    compare_notes(engine.collectives)
    return {
        name: _slice_gradient(engine, place)
        for name, place in _trained_places(engine)
        if engine.gradients.has_gradient(place.entry)
    }


def load_gradients(engine: Zero3Engine, saved: Mapping[str, Tensor]) -> None:
    """Put saved gradients where the next backward adds to them; collective.

    Args:
        engine: holds the shards.
        saved: full gradients by parameter name. Tensors may be a :class:`~.slices.SavedTensor`.
    """

    def fill() -> None:
        for name, place in _trained_places(engine):
            if name in saved:
                _slice_gradient(engine, place).fill(saved[name])

    run_on_all_ranks("Loading gradients", fill)


def _trained_places(engine: Zero3Engine) -> Iterator[tuple[str, Place]]:
    return (
        (name, place)
        for name, place in places_by_name(engine).items()
        if place.entry.trained and place.entry.size.numel()
    )


def _slice_gradient(engine: Zero3Engine, place: Place) -> SlicedTensor:
    return SlicedTensor(place, engine.gradients.room_for(place.entry))
