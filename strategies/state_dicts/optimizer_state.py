"""Optimizer state in torch's own layout, from and to shards.

Every tensor has its parameter's shape. A full state is what ``torch.optim.Optimizer.state_dict()``
would return on one device, with parameters numbered in the order in which the user passed them. A
sharded state has parameters by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..engine import SCALARS, Entry, OptimizerStep, Zero3Engine
from .collective_errors import run_on_all_ranks
from .gather import replace_tensors
from .optimizer_hooks import run_hooks
from .slices import SlicedTensor, owned_tensor, slice_of

State = Mapping[str, dict[str, Any]]  # an optimizer's state, by parameter name


def sliced_optimizer_state(step: OptimizerStep, owned_state: State | None = None) -> dict[str, Any]:
    """Return the state of an optimizer by parameter name; collective with ``owned_state``.

    The optimizer's hooks see the result and may change it.

    Args:
        step: of the optimizer, which steps on shards if ``owned_state`` is None.
        owned_state: this rank's part of the state of an optimizer that steps on full tensors.

    Returns:
        {"state": {parameter: {key: SlicedTensor or scalar}}, "param_groups": [{option: value,
        "params": [names]}]}, the layout of
        ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``; the same on all ranks
        but for the slices.
    """
    optimizer = step.optimizer
    run_hooks(optimizer, "state_dict_pre")
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": members}
        for group, members in zip(optimizer.param_groups, step.names(), strict=True)
    ]
    if owned_state is None:
        state = {
            entry.name: {
                key: slice_of(step.engine, entry, value)
                if isinstance(value, Tensor) and value.dim() == 1
                else value.cpu().clone()
                if isinstance(value, Tensor)
                else value
                for key, value in step.state[entry.shard].items()
            }
            for entries in step.entries()
            for entry in entries
            if step.state.get(entry.shard)
        }
    else:
        state = _describe_owned_state(step.engine, owned_state, type(optimizer).__name__)
    return run_hooks(
        optimizer, "state_dict_post", {"state": {**state, **step.shared()}, "param_groups": groups}
    )


def _describe_owned_state(
    engine: Zero3Engine, owned_state: State, cls: str
) -> dict[str, dict[str, Any]]:
    """Return name -> key -> slice or scalar, of all owners; collective."""
    mine = {
        name: {key: _describe_value(value) for key, value in state.items()}
        for name, state in owned_state.items()
    }
    result: dict[str, dict[str, Any]] = {}
    by_rank = engine.collectives.all_gather_object(mine)
    # only the first replica's ranks: the other replicas own the same
    for owner, theirs in enumerate(by_rank[: engine.collectives.world_size]):
        for name, kinds in theirs.items():
            _refuse_containers(cls, name, kinds)
            values = owned_state.get(name, {})
            result[name] = {
                key: (
                    owned_tensor(engine, name, kind.size(), kind.dtype, owner, values.get(key))
                    if isinstance(kind, Tensor) and kind.is_meta
                    else kind
                )
                for key, kind in kinds.items()
            }
    return result


def _describe_value(value: Any) -> Any:
    """Return a tensor with dimensions without its values; scalars are returned themselves.

    Of a container of tensors, which no checkpoint has a place for, it is the class.
    """
    if isinstance(value, Tensor) and value.dim():
        return value.to("meta")
    if isinstance(value, dict | list | tuple) and any(
        isinstance(leaf, Tensor) for leaf in tree_leaves(value)
    ):
        return type(value)
    return value.cpu() if isinstance(value, Tensor) else value


def _refuse_containers(cls: str, name: str, kinds: dict[str, Any]) -> None:
    for key, kind in kinds.items():
        if isinstance(kind, type):
            raise ValueError(
                f"{cls} keeps {key!r} of parameter {name!r} as a {kind.__name__} of tensors, which"
                " Zero3Strategy cannot save. Keep each tensor under a key of its own in"
                " `state[parameter]`, or save the weights alone:"
                " `ModelCheckpoint(save_weights_only=True)`, `trainer.save_checkpoint(path,"
                " weights_only=True)`."
            )


def number_parameters(state: dict[str, Any]) -> dict[str, Any]:
    """Replace parameter names by numbers in the user's order.

    The result has the layout of ``torch.optim.Optimizer.state_dict()``.
    """
    names = [name for group in state["param_groups"] for name in group["params"]]
    numbers = {name: k for k, name in enumerate(names)}
    return {
        **state,
        "state": {
            numbers.get(name, name): values for name, values in state.get("state", {}).items()
        },
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def name_parameters(state: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    """Undo :func:`number_parameters`; return ``state`` itself if its groups are of other sizes.

    Args:
        state: numbers parameters in any way; what it says of others is left out.
        names: of the parameters of each group.
    """
    numbers = [group["params"] for group in state["param_groups"]]
    if [*map(len, numbers)] != [*map(len, names)]:
        return state
    groups = [
        {**group, "params": members}
        for group, members in zip(state["param_groups"], names, strict=True)
    ]
    name_of = dict(zip(chain(*numbers), chain(*names), strict=True))
    named = {
        name_of.get(key, key): values
        for key, values in state["state"].items()
        if key in name_of or not isinstance(key, int)
    }
    return {**state, "state": named, "param_groups": groups}


def load_optimizer_state(
    step: OptimizerStep,
    saved: dict[str, Any],
    index: int,
    steps_on_whole: bool = False,
) -> list[str]:
    """Load this rank's part of a saved state; collective.

    Args:
        step: of the optimizer. Its state and the options of its groups are replaced; its hooks
            before loading see ``saved``.
        saved: in torch's layout, by number or by parameter name. Tensors may be a
            :class:`~.slices.SavedTensor`.
        index: of the optimizer, for errors.
        steps_on_whole: the optimizer steps on full tensors.

    Returns:
        warnings about parameters that were saved in other groups, or not at all.

    Raises:
        ValueError: groups without names do not fit the optimizer's, or a saved tensor does not fit
            its parameter.
        CheckpointError: on all ranks, if one cannot read its part.
    """
    optimizer, names = step.optimizer, step.names()
    saved = run_hooks(optimizer, "load_state_dict_pre", {"state": {}, **saved})
    groups = saved["param_groups"]
    if not any(isinstance(key, str) for group in groups for key in group["params"]):
        named = name_parameters(saved, names)
        if named is saved:
            raise ValueError(
                f"Optimizer {index} was saved with param groups of other sizes, and the checkpoint"
                " does not say which parameters they are. Build the optimizer as in the saved run,"
                " or save a sharded checkpoint there."
            )
        saved = named
    parameters = {name for group in saved["param_groups"] for name in group["params"]}
    shared = {key: value for key, value in saved["state"].items() if key not in parameters}
    saved["state"] = {name: state for name, state in saved["state"].items() if name in parameters}
    remarks = _load_group_options(names, optimizer, saved, index)
    step.state_of_parameters.clear()
    step.state.update(deepcopy(shared))
    reads: list[tuple[SlicedTensor, Tensor]] = []
    wholes: list[tuple[Entry, dict[str, Any]]] = []
    for group, entries in zip(optimizer.param_groups, step.entries(), strict=True):
        for entry in entries:
            its = saved["state"].get(entry.name) or {}
            if steps_on_whole:
                wholes.append((entry, its))
                continue
            for key, value in its.items():
                if not isinstance(value, Tensor):
                    mine: Any = value
                elif key in SCALARS or (not value.dim() and entry.size):
                    # where the optimizer's step reads it
                    on_device = key != "step" or group.get("fused") or group.get("capturable")
                    mine = value.to(entry.shard.device if on_device else "cpu", copy=True)
                else:
                    mine = _load_elements(entry, key, value)
                    reads.append((slice_of(step.engine, entry, mine), value))
                step.state.setdefault(entry.shard, {})[key] = mine

    def fill() -> None:
        for entry, whole in wholes:
            step.stand_ins.cut_state(entry, whole, step.state)
        for target, value in reads:
            target.fill(value)

    run_on_all_ranks(f"Loading the state of optimizer {index}", fill)
    return remarks


def _load_elements(entry: Entry, key: str, value: Tensor) -> Tensor:
    """Return the memory of this rank's elements of ``value``.

    It gets the parameter's dtype (if floating) and device, as
    ``torch.optim.Optimizer._process_value_according_to_param_policy`` chooses them.
    """
    if value.shape != entry.size:
        raise ValueError(
            f"Optimizer state {key!r} of parameter {entry.name!r} has shape {tuple(value.shape)},"
            f" the parameter has {tuple(entry.size)}."
        )
    both_float = entry.shard.is_floating_point() and value.dtype.is_floating_point
    dtype = entry.shard.dtype if both_float else value.dtype
    return torch.zeros_like(entry.shard, dtype=dtype, requires_grad=False)


def broadcast_created_state(engine: Zero3Engine, states: Sequence[State]) -> list[Any]:
    """Give all ranks the state that rank 0's optimizers created with their parameters; collective.

    The parameters' values are rank 0's on all ranks, too.
    """
    is_source = engine.collectives.global_rank == 0
    owned = [
        _describe_owned_state(engine, state if is_source else {}, f"Optimizer {index}")
        for index, state in enumerate(states)
    ]
    return replace_tensors(owned, lambda tensor: tensor.gather_values().cpu())


def _load_group_options(
    names: list[list[str]], optimizer: Optimizer, saved: dict[str, Any], index: int
) -> list[str]:
    """Give each group the options of the one saved group that its parameters were in.

    Returns:
        warnings about groups and parameters for which that is not possible.
    """
    saved_in = {
        name: k for k, group in enumerate(saved["param_groups"]) for name in group["params"]
    }
    remarks = []
    for number, (group, members) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        sources = {saved_in[name] for name in members if name in saved_in}
        if not members and number < len(saved["param_groups"]):
            sources = {number}
        if len(sources) == 1:
            source = saved["param_groups"][sources.pop()]
            # as torch does: what is changed in place later is this group's alone
            options = deepcopy({key: value for key, value in source.items() if key != "params"})
            for key, value in options.items():
                # a learning rate that a CUDA graph reads stays on its device
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    options[key] = value.to(group[key].device)
            group.update(options)
        else:
            remarks.append(
                f"Param group {number} of optimizer {index}: its parameters were in {len(sources)}"
                " groups of the saved optimizer, so it keeps the learning rate and other options of"
                " `configure_optimizers`."
            )
    mine = {name for members in names for name in members}
    fresh, dropped = sorted(mine - saved_in.keys()), sorted(saved["state"].keys() - mine)
    if fresh:
        remarks.append(
            f"Optimizer {index} starts without state for {fresh[0]!r} (and {len(fresh) - 1} more),"
            " which the saved one did not train."
        )
    if dropped:
        remarks.append(
            f"The saved state of {dropped[0]!r} (and {len(dropped) - 1} more) is not used:"
            f" optimizer {index} does not train them."
        )
    return remarks
