"""Gradients of an unfinished accumulation window, for a checkpoint made in the middle of one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..engine import Entry, Zero3Engine, compare_notes
from .collective_errors import run_on_all_ranks
from .slices import SlicedTensor, slice_of


def sliced_gradients(engine: Zero3Engine) -> dict[str, SlicedTensor]:
    """Return a slice of each gradient, by parameter name; collective.

    Raises:
        DivergenceError: ranks assigned different gradients to a parameter, which the error names.
    """
    engine.passes.reduce_held()
    compare_notes(engine.collectives)
    return {
        entry.name: _slice_gradient(engine, entry)
        for entry in _trained_entries(engine)
        if engine.gradients.has_gradient(entry)
    }


def load_gradients(engine: Zero3Engine, saved: Mapping[str, Tensor]) -> None:
    """Put saved gradients where the next backward adds to them; collective.

    Args:
        engine: holds the shards.
        saved: full gradients by parameter name. Tensors may be a :class:`~.slices.SavedTensor`.
    """

    def fill() -> None:
        for entry in _trained_entries(engine):
            if entry.name in saved:
                _slice_gradient(engine, entry).fill(saved[entry.name])

    run_on_all_ranks("Loading gradients", fill)


def _trained_entries(engine: Zero3Engine) -> list[Entry]:
    return [entry for entry in engine.entries.values() if entry.trained and entry.size.numel()]


def _slice_gradient(engine: Zero3Engine, entry: Entry) -> SlicedTensor:
    return slice_of(engine, entry, engine.gradients.room_for(entry))
