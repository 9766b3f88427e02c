"""The model's state dict with sharded parameters: taken without gathering, and loaded into the shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..engine import Zero3Engine
from ..engine.shards import FlatGroup
from .slices import Flats, SavedTensor, places

if TYPE_CHECKING:
    from .sharded import ShardedCheckpoint


def own_values(group: FlatGroup) -> Tensor:
    """Where the module's own values are."""
    return group.data


def sliced_state_dict(engine: Zero3Engine, module: nn.Module, flats: Flats = own_values) -> dict[str, Any]:
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
            new = place.slice_of(flats, dtype, engine.device) if size.numel() else torch.empty(size, dtype=dtype)
            state[key] = slices.setdefault(id(value), new)
    return state


def load_state_dict(
    engine: Zero3Engine, module: nn.Module, state: Mapping[str, Any], strict: bool, source: ShardedCheckpoint | None
) -> tuple[list[str], list[str]]:
    """Load weights into the shards; of saved tensors every rank reads what it holds. Collective.

    Args:
        engine: holds the parameters.
        module: the whole model.
        state: whole tensors, or the :class:`~.slices.SavedTensor` of ``source``.
        strict: refuse missing and unexpected keys.
        source: where to read saved tensors.

    Returns:
        keys that were missing in ``state``, and keys that the model does not have.

    Raises:
        RuntimeError: keys with ``strict``, or shapes, do not fit; nothing was changed then.
    """
    targets = sliced_state_dict(engine, module)
    keys = {"Missing": [k for k in targets if k not in state], "Unexpected": [k for k in state if k not in targets]}
    told = [
        f"{what} key(s) in state_dict: " + ", ".join(f'"{k}"' for k in found) + ". " for what, found in keys.items() if found
    ]
    wrong = [
        f"size mismatch for {k}: the checkpoint has {tuple(value.shape)}, the model {tuple(targets[k].shape)}."
        for k, value in state.items()
        if isinstance(value, Tensor) and isinstance(targets.get(k), Tensor) and value.shape != targets[k].shape
    ]
    if wrong or (strict and told):
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t" + "\n\t".join([*told, *wrong]))
    saved = {k: v for k, v in state.items() if isinstance(v, SavedTensor) and k in targets} if source is not None else {}
    module.load_state_dict({k: v for k, v in state.items() if k in targets and k not in saved}, strict=False)
    if source is not None:
        source.read(list({id(targets[k]): (value, targets[k]) for k, value in saved.items()}.values()))
        engine.weights_changed()
    return keys["Missing"], keys["Unexpected"]
