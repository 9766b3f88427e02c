"""Optimizer state in torch's own layout, from and to the flat shards.

Every tensor has its parameter's shape. A full state is what ``torch.optim.Optimizer.state_dict()``
would return on one device, with parameters numbered in the order in which the user passed them. A
sharded state has parameters by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..engine import Zero3Engine, unguarded
from ..engine.segments import Segment
from ..engine.shards import FlatGroup
from .optimizer_hooks import run_hooks
from .slices import (
    OwnedTensor,
    Place,
    SavedTensor,
    SlicedTensor,
    TensorDescription,
    places_by_name,
)

State = Mapping[str, dict[str, Any]]  # an optimizer's state, by parameter name
_FlatState = Mapping[Any, dict[str, Any]]  # an optimizer's state, by segment of a flat tensor


def sliced_optimizer_state(
    engine: Zero3Engine, index: int, optimizer: Optimizer, owned_state: State | None = None
) -> dict[str, Any]:
    """Return the state of optimizer ``index`` by parameter name; collective.

    The optimizer's hooks see the result and may change it.

    Args:
        engine: holds the optimizer's parameters.
        index: of the optimizer.
        optimizer: steps on flat tensors if ``owned_state`` is None.
        owned_state: this rank's part of the state of an optimizer that steps on full tensors.

    Returns:
        {"state": {parameter: {key: SlicedTensor or scalar}}, "param_groups": [{option: value,
        "params": [names]}]}, the layout of
        ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``; the same on all ranks
        but for the slices.
    """
    run_hooks(optimizer, "state_dict_pre")
    groups, shared = _pack_groups(engine, index, optimizer), _shared_state(optimizer)
    if owned_state is None:
        state = flat_state(engine, index, optimizer.state)
    else:
        state = _describe_owned_state(engine, owned_state, type(optimizer).__name__)
    return run_hooks(
        optimizer, "state_dict_post", {"state": {**state, **shared}, "param_groups": groups}
    )


def flat_state(engine: Zero3Engine, index: int, state: _FlatState) -> dict[str, dict[str, Any]]:
    """Return name -> key -> slice or scalar, of state on flat tensors; collective.

    Args:
        engine: holds the optimizer's parameters.
        index: of the optimizer.
        state: of its flat tensors.
    """
    places, kinds = places_by_name(engine), _agree_on_state(engine, index, state)
    sources: dict[tuple[str, torch.dtype], _StateFlats] = {}

    def slice_value(name: str, key: str, kind: Any) -> Any:
        if not isinstance(kind, _Elementwise):
            return kind
        flats = sources.setdefault((key, kind.dtype), _StateFlats(state, key, kind.dtype))
        return places[name].slice_of(flats, kind.dtype, engine.device)

    names = [name for members in engine.optimizer_names[index] for name in members if name in kinds]
    return {
        name: {key: slice_value(name, key, kind) for key, kind in kinds[name].items()}
        for name in names
    }


def _shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Return the state that belongs to no parameter, such as one step counter for all."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def clear_state(optimizer: Optimizer) -> None:
    """Delete the state of every tensor; state that belongs to no tensor stays."""
    shared = _shared_state(optimizer)
    optimizer.state.clear()
    optimizer.state.update(shared)


def _pack_groups(engine: Zero3Engine, index: int, optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": members}
        for group, members in zip(
            optimizer.param_groups, engine.optimizer_names[index], strict=True
        )
    ]


def _describe_owned_state(
    engine: Zero3Engine, owned_state: State, cls: str
) -> dict[str, dict[str, Any]]:
    """Return name -> key -> :class:`OwnedTensor` or scalar, of all owners; collective."""
    places = places_by_name(engine)
    mine = {name: _describe_values(state) for name, state in owned_state.items()}
    result: dict[str, dict[str, Any]] = {}
    by_rank = engine.collectives.all_gather_object(mine)
    # only the first replica's ranks: the other replicas own the same
    for owner, theirs in enumerate(by_rank[: engine.collectives.world_size]):
        for name, kinds in theirs.items():
            _refuse_containers(cls, name, kinds)
            values = owned_state.get(name, {})
            result[name] = {
                key: (
                    OwnedTensor(engine, places[name], kind[0], kind[1], owner, values.get(key))
                    if isinstance(kind, tuple)
                    else kind
                )
                for key, kind in kinds.items()
            }
    return result


@dataclass(frozen=True)
class _Container:
    """Stands for a container of tensors, which no checkpoint has a place for."""

    kind: str


def _describe_values(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _describe_value(value) for key, value in state.items()}


def _describe_value(value: Any) -> Any:
    """Return (shape, dtype) of a tensor with dimensions; scalars are returned themselves."""
    if _is_elementwise(value):
        return value.shape, value.dtype
    if isinstance(value, dict | list | tuple) and any(
        isinstance(leaf, Tensor) for leaf in tree_leaves(value)
    ):
        return _Container(type(value).__name__)
    return value.cpu() if isinstance(value, Tensor) else value


def _refuse_containers(cls: str, name: str, kinds: dict[str, Any]) -> None:
    for key, kind in kinds.items():
        if isinstance(kind, _Container):
            raise ValueError(
                f"{cls} keeps {key!r} of parameter {name!r} as a {kind.kind} of tensors, which"
                " Zero3Strategy cannot save. Keep each tensor under a key of its own in"
                " `state[parameter]`, or save the weights alone:"
                " `ModelCheckpoint(save_weights_only=True)`, `trainer.save_checkpoint(path,"
                " weights_only=True)`."
            )


@dataclass(frozen=True)
class _Elementwise:
    """Stands for a tensor with a value for each element of the parameter."""

    dtype: torch.dtype


def _agree_on_state(
    engine: Zero3Engine, index: int, states: _FlatState
) -> dict[str, dict[str, Any]]:
    """Return name -> key -> scalar or :class:`_Elementwise`; collective.

    It has every parameter that has state on any rank.
    """
    mine: dict[str, dict[str, Any]] = {}
    for flat in _groups_of(engine, index):
        for segment, state in _segments_with_state(flat, states):
            kinds = {
                k: _Elementwise(v.dtype) if _is_elementwise(v) else v for k, v in state.items()
            }
            for entry in flat.entries:
                if entry.part and segment.start <= entry.part.start < segment.stop:
                    mine[entry.name] = {
                        k: v.cpu().clone() if isinstance(v, Tensor) else v for k, v in kinds.items()
                    }
    merged: dict[str, dict[str, Any]] = {}
    for theirs in engine.collectives.all_gather_object(mine):
        for name, kinds in theirs.items():
            merged.setdefault(name, kinds)
    return merged


def _groups_of(engine: Zero3Engine, index: int) -> list[FlatGroup]:
    return [flat for flat in engine.groups if flat.key.optimizer == index]


class _StateFlats:
    """One key of an optimizer's state, laid out like the groups' values."""

    def __init__(self, state: _FlatState, key: str, dtype: torch.dtype) -> None:
        self._state, self._key, self._dtype = state, key, dtype
        # of the last group that was cut into segments: its state in one flat tensor
        self._joined_state: tuple[FlatGroup, Tensor] | None = None

    def __call__(self, group: FlatGroup) -> Tensor | None:
        states = {
            segment.start: state.get(self._key)
            for segment, state in _segments_with_state(group, self._state)
        }
        if not states:
            return None
        if len(group.segments) == 1 and isinstance(state := states.get(0), Tensor):
            return state
        if self._joined_state is None or self._joined_state[0] is not group:
            flat = torch.zeros(group.numel, dtype=self._dtype, device=group.data.device)
            for segment in group.segments:
                if isinstance(state := states.get(segment.start), Tensor):
                    segment.view(flat).copy_(state)
            self._joined_state = group, flat
        return self._joined_state[1]


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


def load_optimizer_state(
    engine: Zero3Engine,
    index: int,
    optimizer: Optimizer,
    saved: dict[str, Any],
    set_owned_state: Callable[[State], None] | None = None,
) -> tuple[list[tuple[SavedTensor, SlicedTensor]], list[str]]:
    """Load this rank's part of a saved state; local.

    Args:
        engine: holds the optimizer's shards.
        index: of the optimizer.
        optimizer: its state and the options of its groups are replaced. Its hooks before loading
            see ``saved``.
        saved: in torch's layout, by number or by parameter name. Tensors may be a
            :class:`~.slices.SavedTensor`.
        set_owned_state: loads the state of an optimizer that steps on full tensors.

    Returns:
        pairs of a saved tensor and the slice that its values are still to be read into; and
        warnings about parameters that were saved in other groups, or not at all.

    Raises:
        ValueError: groups without names do not fit the optimizer's, or a saved tensor does not fit
            its parameter.
    """
    saved = run_hooks(optimizer, "load_state_dict_pre", {**saved})
    saved = _name_parameters(saved, engine.optimizer_names[index], index)
    parameters = {name for group in saved["param_groups"] for name in group["params"]}
    shared = {key: value for key, value in saved["state"].items() if key not in parameters}
    saved["state"] = {name: state for name, state in saved["state"].items() if name in parameters}
    remarks = _load_group_options(engine.optimizer_names[index], optimizer, saved, index)
    clear_state(optimizer)
    optimizer.state.update(shared)
    if set_owned_state is not None:
        set_owned_state(saved["state"])
        return [], remarks
    reads: list[tuple[SavedTensor, SlicedTensor]] = []
    keys = _elementwise_keys(saved["state"])
    for flat in _groups_of(engine, index):
        reads += _load_group(engine, flat, optimizer, saved["state"], keys)
    return reads, remarks


def take_over_state(
    engine: Zero3Engine, index: int, optimizer: Optimizer, state: State
) -> list[tuple[Any, SlicedTensor]]:
    """Shard state by parameter name; local.

    The state has full tensors (Adagrad makes some with its parameters), or slices. Tensors keep
    their dtypes.

    Returns:
        pairs of a slice in ``state`` and the slice that its full value is still to be filled into.
    """
    clear_state(optimizer)
    keys = _elementwise_keys(state)
    return [
        read
        for flat in _groups_of(engine, index)
        for read in _load_group(engine, flat, optimizer, state, keys, keeps_dtypes=True)
    ]


def broadcast_created_state(engine: Zero3Engine, states: Sequence[State]) -> list[Any]:
    """Give all ranks the state that rank 0's optimizers created with their parameters; collective.

    The parameters' values are rank 0's on all ranks, too.
    """
    mine = [{name: _describe_values(state[name]) for name in state} for state in states]
    first = engine.collectives.all_gather_object(mine)[0]

    def receive(index: int, name: str, key: str, kind: Any) -> Any:
        if not isinstance(kind, tuple):
            return kind
        is_source = engine.collectives.global_rank == 0
        value = states[index][name][key] if is_source else torch.empty(kind[0], dtype=kind[1])
        return engine.collectives.broadcast(value.to(engine.device).contiguous()).cpu()

    # in rank 0's order on all ranks: each value is a broadcast of its own
    return [
        {
            name: {key: receive(index, name, key, kind) for key, kind in kinds.items()}
            for name, kinds in state.items()
        }
        for index, state in enumerate(first)
    ]


def _name_parameters(saved: dict[str, Any], names: list[list[str]], index: int) -> dict[str, Any]:
    """Return the saved state by parameter name; undo :func:`number_parameters`."""
    groups = saved["param_groups"]
    if any(isinstance(key, str) for group in groups for key in group["params"]):
        return {"state": saved.get("state", {}), "param_groups": groups}
    if [len(g["params"]) for g in groups] != [len(g) for g in names]:
        raise ValueError(
            f"Optimizer {index} was saved with param groups of {[len(g['params']) for g in groups]}"
            f" parameters, but has groups of {[len(g) for g in names]}, and the checkpoint does not"
            " say which parameters they are. Build the optimizer as in the saved run, or save a"
            " sharded checkpoint there."
        )
    name_of = {
        k: name
        for g, members in zip(groups, names, strict=True)
        for k, name in zip(g["params"], members, strict=True)
    }
    return {
        "state": {
            name_of.get(k, k): state
            for k, state in saved["state"].items()
            if k in name_of or not isinstance(k, int)
        },
        "param_groups": [
            {**g, "params": members} for g, members in zip(groups, names, strict=True)
        ],
    }


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
            options = {key: value for key, value in source.items() if key != "params"}
            for key, value in options.items():
                # a learning rate that a CUDA graph reads stays on its device
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    options[key] = value.to(group[key].device)
            group.update(options)
        else:
            origin = f"came from groups {sorted(sources)} of" if sources else "were not in"
            remarks.append(
                f"Param group {number} of optimizer {index}: its parameters {origin} the saved"
                " optimizer, so it keeps the learning rate and other options of"
                " `configure_optimizers`."
            )
    mine = {name for members in names for name in members}
    fresh, dropped = sorted(mine - saved_in.keys()), sorted(saved["state"].keys() - mine)
    if fresh:
        remarks.append(
            f"Optimizer {index} starts without state for {_quote_names(fresh)}, which the saved"
            " one did not train."
        )
    if dropped:
        remarks.append(
            f"The saved state of {_quote_names(dropped)} is not used: optimizer {index} does not"
            " train them."
        )
    return remarks


def _quote_names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _load_group(
    engine: Zero3Engine,
    flat: FlatGroup,
    optimizer: Optimizer,
    by_name: State,
    elementwise: set[str],
    keeps_dtypes: bool = False,
) -> list[tuple[Any, SlicedTensor]]:
    """Put the state of a group's parameters under its segments; return reads still to be done."""
    mine = [
        (place.entry.part.start, place)
        for place in places_by_name(engine).values()
        if place.entry.group is flat and place.entry.part is not None
    ]
    mine.sort(key=lambda pair: pair[0])
    # Adjacent parameters with the same scalars (step counts) share a segment: an optimizer has one
    # set of scalars for each.
    signatures = [
        (start, _signature(by_name.get(place.entry.name), elementwise)) for start, place in mine
    ]
    pairs = zip(signatures[1:], signatures, strict=False)
    flat.cut([start for (start, signature), (_, before) in pairs if signature != before])
    reads: list[tuple[Any, SlicedTensor]] = []
    for segment in flat.segments:
        inside = [place for start, place in mine if segment.start <= start < segment.stop]
        if inside and by_name.get(inside[0].entry.name):
            states = [by_name[place.entry.name] for place in inside]
            vectors = {
                key: [state[key] for state in states]
                for key, value in states[0].items()
                if key in elementwise and isinstance(value, Tensor)
            }
            scalars = {key: value for key, value in states[0].items() if key not in vectors}
            optimizer.state[segment.parameter] = {
                **scalar_state(flat, optimizer, scalars),
                **_vector_state(flat, segment, inside, vectors, reads, keeps_dtypes),
            }
    return reads


def _signature(state: dict[str, Any] | None, vectors: set[str]) -> Any:
    """Return the dtypes of vectors and the values of scalars: equal if a segment may be shared."""
    if not state:
        return None
    return {
        k: getattr(v, "dtype", v) if k in vectors else float(v) if isinstance(v, Tensor) else v
        for k, v in state.items()
    }


def _is_elementwise(value: Any) -> bool:
    return isinstance(value, SlicedTensor) or (isinstance(value, Tensor) and len(value.shape) > 0)


def _elementwise_keys(by_name: State) -> set[str]:
    """Return the keys under which parameters have a value for each element.

    The state of a parameter without dimensions does not say so: its one value looks like a scalar.
    """
    items = [item for state in by_name.values() for item in state.items()]
    tensors = {key for key, value in items if isinstance(value, Tensor)}
    return {key for key, value in items if _is_elementwise(value)} or tensors - {"step"}


def _vector_state(
    flat: FlatGroup,
    segment: Segment,
    inside: list[Place],
    vectors: dict[str, list[Tensor]],
    reads: list[tuple[Any, SlicedTensor]],
    keeps_dtypes: bool,
) -> dict[str, Tensor]:
    """Return key -> vector [elements of the segment]; append to ``reads`` what is not filled in."""
    result = {}
    for key, sources in vectors.items():
        # Loaded state gets the parameter's dtype (if floating) and device, as
        # `torch.optim.Optimizer._process_value_according_to_param_policy` chooses them.
        dtype = sources[0].dtype
        if not keeps_dtypes and flat.data.is_floating_point() and dtype.is_floating_point:
            dtype = flat.data.dtype
        result[key] = torch.zeros(
            segment.stop - segment.start, dtype=dtype, device=flat.data.device
        )
        for place, source in zip(inside, sources, strict=True):
            _require_shape(place, key, source)
            target = place.slice_within(result[key], segment.start)
            if isinstance(source, TensorDescription):
                reads.append((source, target))
            else:
                target.fill(source)
    return result


def scalar_state(flat: FlatGroup, optimizer: Optimizer, scalars: dict[str, Any]) -> dict[str, Any]:
    """Copy scalars of a group's parameters to the device where the optimizer's step reads them."""
    assert flat.key.group is not None  # an optimizer has it
    group = optimizer.param_groups[flat.key.group]
    steps_on_device = group.get("fused") or group.get("capturable")
    result = {}
    for key, value in scalars.items():
        device = flat.data.device if steps_on_device or key != "step" else "cpu"
        result[key] = value.to(device, copy=True) if isinstance(value, Tensor) else value
    return result


def _require_shape(place: Place, key: str, source: Tensor) -> None:
    if source.shape != place.entry.size:
        raise ValueError(
            f"Optimizer state {key!r} of parameter {place.entry.name!r} has shape"
            f" {tuple(source.shape)}, the parameter has {tuple(place.entry.size)}."
        )


def _segments_with_state(
    group: FlatGroup, state: _FlatState
) -> Iterator[tuple[Segment, dict[str, Any]]]:
    """Yield the group's segments that have state, with their states."""
    for segment in group.segments:
        if segment.parameter in state:
            yield segment, unguarded(state[segment.parameter])
