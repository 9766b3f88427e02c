"""The model's state dict with sharded parameters: taken without gathering, and loaded into the
shards.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..engine import Zero3Engine
from ..engine.shards import FlatGroup
from .collective_errors import CheckpointError, describe, together
from .slices import Flats, SavedTensor, SlicedTensor, places


class TensorSource(Protocol):
    """A checkpoint whose tensors have not been read yet."""

    def read(self, wanted: Iterable[tuple[SavedTensor, Tensor]]) -> None:
        """Fill each tensor or slice with the saved one beside it; collective."""


def own_values(group: FlatGroup) -> Tensor:
    """Where the module's own values are."""
    return group.data


def sliced_state_dict(
    engine: Zero3Engine, module: nn.Module, flats: Flats = own_values
) -> dict[str, Any]:
    """``module.state_dict()`` with a :class:`~.slices.SlicedTensor` for each parameter; local.

    Args:
        engine: holds the parameters.
        module: the whole model.
        flats: where the values are, if not the module's own.
    """
    for unit in engine.units:
        if unit.whole:
            unit.adopt()
    owned = {id(place.entry.parameter): place for place in places(engine).values()}
    slices: dict[int, Tensor] = {}  # tied parameters stay one
    state = module.state_dict(keep_vars=True)
    for key, value in state.items():
        place = owned.get(id(value))
        if place is not None:
            # Nobody holds a part of a parameter without elements.
            size, dtype = place.entry.size, place.entry.dtype
            new = (
                place.slice_of(flats, dtype, engine.device)
                if size.numel()
                else torch.empty(size, dtype=dtype)
            )
            state[key] = slices.setdefault(id(value), new)
    return state


def load_state_dict(
    engine: Zero3Engine,
    module: nn.Module,
    state: Mapping[str, Any],
    strict: bool,
    source: TensorSource | None,
) -> tuple[list[str], list[str]]:
    """Load weights into the shards; of saved parameters every rank reads what it holds. Collective.

    All else is the module's own to load: it may keep what it likes, in other shapes too.

    Args:
        engine: holds the parameters.
        module: the whole model.
        state: whole tensors, or the :class:`~.slices.SavedTensor` of ``source``.
        strict: refuse missing and unexpected keys.
        source: where to read saved tensors.

    Returns:
        keys that were missing in ``state``, and keys that the model does not have.

    Raises:
        RuntimeError: keys with ``strict``, or shapes of parameters, do not fit; nothing was changed
            then. Or the module refuses what is no parameter.
    """
    targets = sliced_state_dict(engine, module)
    sharded = {key for key, value in targets.items() if isinstance(value, SlicedTensor)}
    keys = {
        "Missing": [k for k in targets if k not in state],
        "Unexpected": [k for k in state if k not in targets],
    }
    told = [
        f"{what} key(s) in state_dict: " + ", ".join(f'"{k}"' for k in found) + ". "
        for what, found in keys.items()
        if found
    ]
    wrong = [
        f"size mismatch for {k}: the checkpoint has {tuple(value.shape)}, the model"
        f" {tuple(targets[k].shape)}."
        for k, value in state.items()
        if isinstance(value, Tensor) and k in sharded and value.shape != targets[k].shape
    ]
    if wrong or (strict and told):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}:\n\t"
            + "\n\t".join([*told, *wrong])
        )
    saved = (
        {k: v for k, v in state.items() if isinstance(v, SavedTensor) and k in sharded}
        if source is not None
        else {}
    )
    rest = {k: v for k, v in state.items() if k in targets and k not in saved}
    module.load_state_dict(_read_whole(rest, sharded, source), strict=False)
    if source is not None:
        source.read(
            list({id(targets[k]): (value, targets[k]) for k, value in saved.items()}.values())
        )
        engine.weights_changed()
    return keys["Missing"], keys["Unexpected"]


def load_module(
    module: nn.Module, state: Mapping[str, Any], strict: bool, source: TensorSource | None
) -> tuple[list[str], list[str]]:
    """Load weights as other strategies do, by ``module.load_state_dict``; collective.

    What a directory has of parameters is read one by one, as the module copies them.

    Args:
        module: has memory, or other shards than this strategy's.
        state: see :func:`load_state_dict`.
        strict: see there.
        source: see there.

    Returns:
        see there, as far as the module says.

    Raises:
        RuntimeError: keys with ``strict``, or shapes, do not fit.
        CheckpointError: on all ranks, if one could not read.
    """
    error, found = None, None
    state = _read_whole(
        state, {name for name, _ in module.named_parameters(remove_duplicate=False)}, source
    )
    try:
        found = module.load_state_dict(state, strict=strict)
    except Exception as raised:
        error = raised
    told = together("Loading weights", lambda: describe(error))
    if error is not None and told.count(told[0]) == len(told):  # about what all ranks have alike
        raise error
    for rank, what in enumerate(told):
        if what is not None:
            raise CheckpointError(f"Loading weights failed on rank {rank}: {what}") from error
    return getattr(found, "missing_keys", []), getattr(found, "unexpected_keys", [])


def _read_whole(
    state: Mapping[str, Any], but: Container[str], source: TensorSource | None
) -> Mapping[str, Any]:
    """``state`` with the values of saved tensors, which modules may keep, ``but`` of some;
    collective.
    """
    saved = {
        key: value
        for key, value in state.items()
        if isinstance(value, SavedTensor) and key not in but
    }
    if not saved:
        return state
    if source is None:
        return {**state, **{key: value.read() for key, value in saved.items()}}
    whole = {
        key: torch.empty(value.size(), dtype=value.dtype, device="cpu")
        for key, value in saved.items()
    }
    source.read([(value, whole[key]) for key, value in saved.items()])
    return {**state, **whole}
