"""Checkpoints without the parameters that are never trained, and the base that they need."""

from __future__ import annotations

import zlib
from collections.abc import Container, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from ..state_dicts.collective_errors import CheckpointError, run_on_all_ranks
from .regions import Place, regions_of
from .zip_file import Piece, Record, join_checksums

# {name of a frozen parameter: (shape, checksum of its values, or None)}
BASE = "zero3_base"
_REMEDY = (
    "Build the model that the checkpoint was made with, and load the weights of its base: in"
    " `configure_model`, if that is on the meta device (`trainer.strategy.load_weights`)."
)


def frozen_names(module: nn.Module) -> set[str]:
    """Return the names of parameters that need no gradient, all names of tied ones."""
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if not parameter.requires_grad}


def exclude(checkpoint: dict[str, Any], names: Set[str], replica: int | None) -> None:
    """Leave parameters out of a checkpoint that is being saved; collective if checksums are wanted.

    Args:
        checkpoint: has slices, and the optimizers' states by name.
        names: of parameters that are frozen. Those that have optimizer state were trained, by the
            run that this one went on from, and stay.
        replica: number of this rank's replica; None for no checksums.
    """
    trained = {
        name for state in checkpoint.get("optimizer_states", ()) for name in state.get("state", ())
    }
    state = checkpoint["state_dict"]
    left_out = {key: state[key] for key in state if key in names - trained}
    sums = {} if replica is None else _checksums(left_out, replica)
    checkpoint[BASE] = {k: (tuple(v.size()), sums.get(k)) for k, v in left_out.items()}
    for key in left_out:
        del state[key]


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
    for name, (shape, _) in base.items():
        parameter = parameters.get(name)
        if parameter is None:
            found = "no such parameter"
        elif parameter.size() != torch.Size(shape):
            found = f"the shape {tuple(parameter.size())}"
        elif parameter.is_meta and name not in loaded:
            found = "no values for it: it is on the meta device"
        else:
            continue
        raise CheckpointError(
            f"The checkpoint leaves out the frozen parameter {name!r} of shape {tuple(shape)}, and"
            f" the model has {found}. {_REMEDY}"
        )


def require_base_values(
    state: Mapping[str, Any], base: Mapping[str, tuple[Any, int | None]], replica: int
) -> None:
    """Compare the values of frozen parameters with the checksums in a checkpoint; collective.

    Raises:
        CheckpointError: on all ranks, if some have others.
    """
    expected = {name: checksum for name, (_, checksum) in base.items() if checksum is not None}
    found = _checksums({name: state[name] for name in expected}, replica)
    changed = [name for name in expected if found[name] != expected[name]]
    if changed:
        raise CheckpointError(
            f"The frozen parameter {changed[0]!r} (and {len(changed) - 1} more) has other values"
            f" than when the checkpoint was made. {_REMEDY}"
        )


def _checksums(tensors: Mapping[str, Tensor], replica: int) -> dict[str, int]:
    """Return the checksum of each tensor's values, of all ranks' parts; collective."""
    pieces, records, end = [], [], 0
    for name, tensor in tensors.items():
        records.append(Record(name, end, tensor.nbytes, 0, (0, 0)))
        for region in regions_of(tensor, Place("", end)):
            for offset, data in region.runs():
                checksum = zlib.crc32(data.cpu().numpy().data)
                pieces.append(Piece(offset, data.numel(), checksum))
        end += tensor.nbytes
    shares = run_on_all_ranks("Comparing weights", lambda: [] if replica else pieces)
    joined = join_checksums(records, [piece for share in shares for piece in share])
    return dict(zip(tensors, joined, strict=True))
