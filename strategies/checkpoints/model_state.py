"""The model's state dict with sharded parameters: taken without gathering, and loaded into the shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..engine import Zero3Engine
from .slices import SavedTensor, parameter_slices

if TYPE_CHECKING:
    from .sharded import ShardedCheckpoint


def sliced_state_dict(engine: Zero3Engine, module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` with a :class:`~.slices.SlicedTensor` for each parameter, whole tensors on one rank; local."""
    with engine.access.substitute(parameter_slices(engine)):
        return module.state_dict()


def load_state_dict(
    engine: Zero3Engine, module: nn.Module, state: Mapping[str, Any], strict: bool, source: ShardedCheckpoint | None
) -> list[str]:
    """Load weights into the shards; every rank reads what it holds. Collective.

    Args:
        engine: holds the parameters.
        module: the whole model.
        state: whole tensors, or the :class:`~.sharded.SavedTensor` of ``source``.
        strict: refuse missing and unexpected keys.
        source: where to read saved tensors.

    Returns:
        sentences about keys that were missing or unexpected.

    Raises:
        RuntimeError: keys with ``strict``, or shapes, do not fit; nothing was changed then.
    """
    targets = sliced_state_dict(engine, module)
    missing, unexpected = [k for k in targets if k not in state], [k for k in state if k not in targets]
    wrong = [
        f"size mismatch for {k}: the checkpoint has {tuple(value.shape)}, the model {tuple(targets[k].shape)}."
        for k, value in state.items()
        if isinstance(value, Tensor | SavedTensor) and isinstance(targets.get(k), Tensor) and value.shape != targets[k].shape
    ]
    told = [
        f"{what} key(s) in state_dict: {_listed(keys)}"
        for what, keys in (("Missing", missing), ("Unexpected", unexpected))
        if keys
    ]
    if wrong or (strict and told):
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}:\n\t" + "\n\t".join([*told, *wrong]))
    saved = {k: v for k, v in state.items() if isinstance(v, SavedTensor) and k in targets}
    module.load_state_dict({k: v for k, v in state.items() if k in targets and k not in saved}, strict=False)
    if source is not None:
        source.read(list({id(targets[k]): (value, targets[k]) for k, value in saved.items()}.values()))
        engine.weights_changed()
    return told


def _listed(keys: list[str]) -> str:
    return ", ".join(f'"{key}"' for key in keys) + ". "
