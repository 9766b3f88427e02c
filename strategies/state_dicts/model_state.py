"""The model's state dict of slices: made without gathering parameters, and loaded into shards."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..engine import Chunk, Zero3Engine
from .collective_errors import run_on_all_ranks
from .slices import SavedTensor, Shards, SlicedTensor, slice_of


class _KeepDetached(TorchFunctionMode):
    """Makes no tensor of its own where one is to be detached."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.detach else func(*args, **kwargs or {})


def named_values(module: nn.Module) -> dict[str, Any]:
    """Return the module's state dict with its parameters and buffers themselves.

    That is ``state_dict(keep_vars=True)``, also of a module whose own ``state_dict`` takes nothing.
    """
    with _KeepDetached():
        return module.state_dict()


def own_values(chunk: Chunk) -> Tensor:
    """Return the shard of the module's own values."""
    return chunk.read()


def sliced_state_dict(
    engine: Zero3Engine, module: nn.Module, shards: Shards = own_values
) -> dict[str, Any]:
    """Return ``module.state_dict()`` with a slice for each parameter; local.

    Args:
        engine: holds the parameters.
        module: the whole model.
        shards: the shard of each chunk that the slices are views of; by default the module's own
            values. Weight averages give theirs.
    """
    slices: dict[int, Tensor] = {}  # by id of the parameter: tied parameters share a slice
    state = named_values(module)
    for key, value in state.items():
        entry = engine.entries.get(id(value))
        if entry is not None:
            state[key] = slices.setdefault(
                id(value),
                slice_of(engine, entry, entry.part_of(shards(entry.chunk)))
                if entry.size.numel()
                # no rank has a part of a parameter without elements
                else torch.empty(entry.size, dtype=entry.dtype),
            )
    return state


def load_state_dict(
    engine: Zero3Engine, module: nn.Module, state: Mapping[str, Any], strict: bool
) -> None:
    """Load weights into the shards; each rank reads only its part of saved parameters. Collective.

    ``module.load_state_dict`` loads everything else: a module may accept other shapes for its
    buffers and extra state, and change full tensors of its parameters that it loads.

    Args:
        engine: holds the parameters.
        module: the whole model.
        state: full tensors, which may be a :class:`~.slices.SavedTensor`.
        strict: refuse missing and unexpected keys.

    Raises:
        RuntimeError: keys with ``strict``, or shapes of parameters, do not fit, and nothing was
            changed; or the module refuses a value that belongs to no parameter.
        CheckpointError: on all ranks, if one cannot read its part.
    """
    targets = sliced_state_dict(engine, module)
    sharded = {key for key, value in targets.items() if isinstance(value, SlicedTensor)}
    missing, unexpected = compare_keys(targets, state)
    shape_errors = [
        f"size mismatch for {k}: the checkpoint has {tuple(value.shape)}, the model"
        f" {tuple(targets[k].shape)}."
        for k, value in state.items()
        if isinstance(value, Tensor) and k in sharded and value.shape != targets[k].shape
    ]
    require_fit(module, missing, unexpected, strict, shape_errors)
    own = _keys_loaded_by_modules(module)
    parts = {
        k: v
        for k, v in state.items()
        if k in sharded and isinstance(v, Tensor) and (k not in own or isinstance(v, SavedTensor))
    }
    rest = {k: v for k, v in state.items() if k in targets and k not in parts}
    run_on_all_ranks("Loading weights", lambda: rest.update(_read(rest)))
    module.load_state_dict(rest, strict=False)
    # by id of the slice: tied parameters are read once
    last = {id(targets[k]): (targets[k], value) for k, value in parts.items()}

    def fill() -> None:
        for target, value in last.values():
            target.fill(value)

    run_on_all_ranks("Loading weights", fill)
    engine.weights_changed()


def compare_keys(
    targets: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return keys of ``targets`` that are missing in ``state``, and keys that it has beside.

    Of tied parameters, which are one object in ``targets``, one is enough.
    """
    present = {id(targets[key]) for key in state if key in targets}
    missing = [k for k in targets if k not in state and id(targets[k]) not in present]
    return missing, [key for key in state if key not in targets]


def require_fit(
    module: nn.Module,
    missing: list[str],
    unexpected: list[str],
    strict: bool,
    others: Sequence[str] = (),
) -> None:
    """Raise torch's error, a RuntimeError, if keys with ``strict`` do not fit, or on ``others``."""
    key_errors = [
        f"{kind} key(s) in state_dict: " + ", ".join(f'"{k}"' for k in names) + ". "
        for kind, names in (("Missing", missing), ("Unexpected", unexpected))
        if names and strict
    ]
    if key_errors or others:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}:\n\t"
            + "\n\t".join([*key_errors, *others])
        )


def _keys_loaded_by_modules(module: nn.Module) -> set[str]:
    """Return the keys of parameters whose modules have code of their own that may change them."""
    found: set[str] = set()
    for prefix, child in module.named_modules(remove_duplicate=False):
        prefix = prefix and f"{prefix}."
        is_plain = all(
            getattr(type(child), name) is getattr(nn.Module, name)
            for name in ("load_state_dict", "_load_from_state_dict")
        )
        if child._load_state_dict_pre_hooks or not is_plain:
            found |= {prefix + name for name, _ in child.named_parameters(remove_duplicate=False)}
    return found


def load_module(module: nn.Module, state: Mapping[str, Any], strict: bool) -> None:
    """Load weights as other strategies do, by ``module.load_state_dict``; collective.

    Parameters in a sharded checkpoint are read one by one, when the module copies each.

    Args:
        module: has memory, or other shards than this strategy's.
        state: see :func:`load_state_dict`.
        strict: see :func:`load_state_dict`.

    Raises:
        CheckpointError: on all ranks, if some rank could not read, or keys with ``strict``, or
            shapes, do not fit.
    """
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}

    def load() -> None:
        module.load_state_dict({**state, **_read(state, parameters)}, strict=strict)

    run_on_all_ranks("Loading weights", load)


def _read(state: Mapping[str, Any], excluded: Container[str] = ()) -> dict[str, Tensor]:
    """Read the saved tensors in ``state`` whose keys are not ``excluded``; local.

    A module may keep what it loads (extra state), so it must get the values themselves.
    """
    return {
        key: value.read()
        for key, value in state.items()
        if isinstance(value, SavedTensor) and key not in excluded
    }
