"""Checkpoints without the parameters that are never trained."""

from __future__ import annotations

from collections.abc import Container, Mapping, Set
from typing import Any

import torch
from torch import nn

from ..state_dicts.collective_errors import CheckpointError

BASE = "zero3_base"  # {name of a frozen parameter: shape}


def frozen_names(module: nn.Module) -> set[str]:
    """Return the names of parameters that need no gradient, all names of tied ones."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def exclude(checkpoint: dict[str, Any], names: Set[str]) -> None:
    """Leave parameters out of a checkpoint that is being saved.

    Args:
        checkpoint: has slices, and the optimizers' states by name.
        names: of parameters that are frozen. Those that have optimizer state were trained, by the
            run that this one went on from, and stay.
    """
    trained = {
        name for state in checkpoint.get("optimizer_states", ()) for name in state.get("state", ())
    }
    state = checkpoint["state_dict"]
    left_out = [key for key in state if key in names - trained]
    checkpoint[BASE] = {key: tuple(state.pop(key).size()) for key in left_out}


def require_base(module: nn.Module, base: Mapping[str, Any], loaded: Container[str]) -> None:
    """Compare the parameters that a checkpoint leaves out with those of a module.

    Args:
        module: is going to be loaded.
        base: what the checkpoint says of the parameters.
        loaded: names of parameters whose values are going to be loaded from elsewhere.

    Raises:
        CheckpointError: the module's parameters have other names or shapes, or no values.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, shape in base.items():
        parameter = parameters.get(name)
        if (
            parameter is None
            or (parameter.is_meta and name not in loaded)
            or parameter.size() != torch.Size(shape)
        ):
            raise CheckpointError(
                f"The checkpoint leaves out the frozen parameter {name!r} of shape {tuple(shape)},"
                " and the model has none of that shape with values. Build the model that the"
                " checkpoint was made with, and load the weights of its base: in `configure_model`,"
                " if that is on the meta device (`trainer.strategy.load_weights`)."
            )
