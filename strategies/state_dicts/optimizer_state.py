"""Optimizer state in torch's own layout, from and to the flat shards.

Every tensor has its parameter's shape. A full state is what ``torch.optim.Optimizer.state_dict()``
would be on one device, with parameters numbered in the order in which the user passed them. A
sharded one has parameters by name.
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
from .optimizer_hooks import ask_hooks
from .slices import Described, OwnedTensor, Place, SavedTensor, SlicedTensor, places

State = Mapping[str, dict[str, Any]]  # of an optimizer, by parameter name
_FlatState = Mapping[Any, dict[str, Any]]  # ... by flat tensor


def sliced_optimizer_state(
    engine: Zero3Engine, index: int, optimizer: Optimizer, owned: State | None = None
) -> dict[str, Any]:
    """The state of optimizer ``index`` by parameter name; collective.

    Args:
        engine: holds the optimizer's parameters.
        index: of the optimizer.
        optimizer: steps on flat tensors, unless
        owned: is this rank's part of the state of one that steps on whole tensors.

    Returns:
        {"state": {parameter: {key: SlicedTensor or scalar}}, "param_groups": [{option: value,
        "params": [names]}]}, the layout of
        ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``; the same on all ranks
        but for the slices. The optimizer's hooks have seen it.
    """
    ask_hooks(optimizer, "state_dict_pre")
    groups, shared = _packed_groups(engine, index, optimizer), _of_no_parameter(optimizer)
    if owned is None:
        state = flat_state(engine, index, optimizer.state)
    else:
        state = _owned_state(engine, owned, type(optimizer).__name__)
    return ask_hooks(
        optimizer, "state_dict_post", {"state": {**state, **shared}, "param_groups": groups}
    )


def flat_state(engine: Zero3Engine, index: int, state: _FlatState) -> dict[str, dict[str, Any]]:
    """Name -> key -> slice or scalar, of the ``state`` that optimizer ``index`` has of flat
    tensors; collective.
    """
    found, kinds = places(engine), _agree_on_state(engine, index, state)
    sources: dict[tuple[str, torch.dtype], _StateFlats] = {}

    def sliced(name: str, key: str, kind: Any) -> Any:
        if not isinstance(kind, _Elementwise):
            return kind
        flats = sources.setdefault((key, kind.dtype), _StateFlats(state, key, kind.dtype))
        return found[name].slice_of(flats, kind.dtype, engine.device)

    names = [name for members in engine.optimizer_names[index] for name in members if name in kinds]
    return {
        name: {key: sliced(name, key, kind) for key, kind in kinds[name].items()} for name in names
    }


def _of_no_parameter(optimizer: Optimizer) -> dict[Any, Any]:
    """State that an optimizer keeps for all its parameters together, as a counter of steps."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}


def clear_state(optimizer: Optimizer) -> None:
    """Forget the state of tensors; what belongs to none stays."""
    kept = _of_no_parameter(optimizer)
    optimizer.state.clear()
    optimizer.state.update(kept)


def _packed_groups(engine: Zero3Engine, index: int, optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {**{k: v for k, v in group.items() if k != "params"}, "params": members}
        for group, members in zip(
            optimizer.param_groups, engine.optimizer_names[index], strict=True
        )
    ]


def _owned_state(engine: Zero3Engine, owned: State, cls: str) -> dict[str, dict[str, Any]]:
    found = places(engine)
    mine = {name: {k: _told(v) for k, v in state.items()} for name, state in owned.items()}
    result: dict[str, dict[str, Any]] = {}
    everyone = engine.collectives.all_gather_object(mine)
    # the other replicas own the same
    for owner, theirs in enumerate(everyone[: engine.collectives.world_size]):
        for name, kinds in theirs.items():
            _require_told(cls, name, kinds)
            result[name] = {
                key: (
                    OwnedTensor(engine, found[name], *kind, owner, owned.get(name, {}).get(key))
                    if isinstance(kind, tuple)
                    else kind
                )
                for key, kind in kinds.items()
            }
    return result


@dataclass(frozen=True)
class _Container:
    """Holds tensors, which no checkpoint has a place for."""

    kind: str


def _told(value: Any) -> Any:
    if _elementwise(value):
        return value.shape, value.dtype
    if isinstance(value, dict | list | tuple) and any(
        isinstance(leaf, Tensor) for leaf in tree_leaves(value)
    ):
        return _Container(type(value).__name__)
    return value.cpu() if isinstance(value, Tensor) else value


def _require_told(cls: str, name: str, kinds: dict[str, Any]) -> None:
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
    """A tensor with a value for each element of the parameter."""

    dtype: torch.dtype


def _agree_on_state(
    engine: Zero3Engine, index: int, states: _FlatState
) -> dict[str, dict[str, Any]]:
    """Name -> key -> scalar, or what kind of tensor; of every parameter that has state on any rank;
    collective.
    """
    mine: dict[str, dict[str, Any]] = {}
    for flat in (flat for flat in engine.groups if flat.key.optimizer == index):
        owned = flat.owned
        for segment, state in _segments_with_state(flat, states):
            kinds = {k: _Elementwise(v.dtype) if _elementwise(v) else v for k, v in state.items()}
            for entry in owned:
                if segment.start <= entry.part.start < segment.stop:
                    mine[entry.name] = {
                        k: v.cpu().clone() if isinstance(v, Tensor) else v for k, v in kinds.items()
                    }
    merged: dict[str, dict[str, Any]] = {}
    for theirs in engine.collectives.all_gather_object(mine):
        for name, kinds in theirs.items():
            merged.setdefault(name, kinds)
    return merged


class _StateFlats:
    """One kind of an optimizer's state, laid out like the groups' values."""

    def __init__(self, state: _FlatState, key: str, dtype: torch.dtype) -> None:
        self._state, self._key, self._dtype = state, key, dtype
        self._joined: tuple[FlatGroup, Tensor] | None = (
            None  # the last one that was asked for, if it is cut into segments
        )

    def __call__(self, group: FlatGroup) -> Tensor | None:
        states = {
            segment.start: state.get(self._key)
            for segment, state in _segments_with_state(group, self._state)
        }
        if not states:
            return None
        if len(group.segments) == 1 and isinstance(states.get(0), Tensor):
            return states[0]
        if self._joined is None or self._joined[0] is not group:
            flat = torch.zeros(group.numel, dtype=self._dtype, device=group.data.device)
            for segment in group.segments:
                if isinstance(states.get(segment.start), Tensor):
                    segment.view(flat).copy_(states[segment.start])
            self._joined = group, flat
        return self._joined[1]


def numbered(state: dict[str, Any]) -> dict[str, Any]:
    """A state by parameter name as ``torch.optim.Optimizer.state_dict()`` has it: parameters
    numbered in the user's order.
    """
    numbers = {
        name: k
        for k, name in enumerate(
            name for group in state["param_groups"] for name in group["params"]
        )
    }
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
    set_owned: Callable[[State], None] | None = None,
) -> tuple[list[tuple[SavedTensor, SlicedTensor]], list[str]]:
    """Take this rank's part of a saved state; local.

    Args:
        engine: holds the optimizer's shards.
        index: of the optimizer.
        optimizer: its state and the options of its groups are replaced. Its hooks before loading
            see ``saved``.
        saved: in torch's layout, by number or by parameter name. Tensors may be a
            :class:`~.slices.SavedTensor`.
        set_owned: takes the state of an optimizer that steps on whole tensors.

    Returns:
        what is to be read where, and sentences about parameters that were saved in other groups, or
        not at all.

    Raises:
        ValueError: groups without names do not fit the optimizer's, or a saved tensor does not fit
            its parameter.
    """
    saved = ask_hooks(optimizer, "load_state_dict_pre", {**saved})
    saved = _named(saved, engine.optimizer_names[index], index)
    parameters = {name for group in saved["param_groups"] for name in group["params"]}
    shared = {key: value for key, value in saved["state"].items() if key not in parameters}
    saved["state"] = {name: state for name, state in saved["state"].items() if name in parameters}
    remarks = _load_group_options(engine.optimizer_names[index], optimizer, saved, index)
    clear_state(optimizer)
    optimizer.state.update(shared)
    if set_owned is not None:
        set_owned(saved["state"])
        return [], remarks
    reads: list[tuple[SavedTensor, SlicedTensor]] = []
    keys = _elementwise_keys(saved["state"])
    for flat in engine.groups:
        if flat.key.optimizer == index:
            reads += _load_group(engine, flat, optimizer, saved["state"], keys)
    return reads, remarks


def take_over_state(
    engine: Zero3Engine, index: int, optimizer: Optimizer, state: State
) -> list[tuple[Any, SlicedTensor]]:
    """Shard state by parameter name, of whole tensors (Adagrad makes some with its parameters), or
    slices; local.

    Returns:
        which slice's value is to be filled in where.
    """
    clear_state(optimizer)
    flats, keys = (
        [flat for flat in engine.groups if flat.key.optimizer == index],
        _elementwise_keys(state),
    )
    return [
        read
        for flat in flats
        for read in _load_group(engine, flat, optimizer, state, keys, own_dtypes=True)
    ]


def of_rank_zero(engine: Zero3Engine, states: Sequence[State]) -> list[State]:
    """What rank 0's optimizers created with their parameters, which all ranks have of rank 0, too;
    collective.
    """
    mine = [
        {name: {k: _told(v) for k, v in values.items()} for name, values in state.items()}
        for state in states
    ]
    first: Any = engine.collectives.all_gather_object(mine)[0]

    def received(index: int, name: str, key: str, kind: Any) -> Any:
        if not isinstance(kind, tuple):
            return kind
        here = engine.collectives.global_rank == 0
        value = states[index][name][key] if here else torch.empty(kind[0], dtype=kind[1])
        return engine.collectives.broadcast(value.to(engine.device).contiguous()).cpu()

    return [
        {
            name: {key: received(index, name, key, kind) for key, kind in kinds.items()}
            for name, kinds in told.items()
        }
        for index, told in enumerate(first)
    ]


def _named(saved: dict[str, Any], names: list[list[str]], index: int) -> dict[str, Any]:
    """The saved state by parameter name."""
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
    """Each group takes the options of the one saved group that its parameters were in; returns
    remarks.
    """
    saved_in = {
        name: k for k, group in enumerate(saved["param_groups"]) for name in group["params"]
    }
    remarks = []
    for number, (group, members) in enumerate(zip(optimizer.param_groups, names, strict=True)):
        homes = {saved_in[name] for name in members if name in saved_in}
        if not members and number < len(saved["param_groups"]):
            homes = {number}
        if len(homes) == 1:
            options = {k: v for k, v in saved["param_groups"][homes.pop()].items() if k != "params"}
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    options[key] = value.to(group[key].device)  # a learning rate that a graph reads
            group.update(options)
        else:
            came = f"came from groups {sorted(homes)} of" if homes else "were not in"
            remarks.append(
                f"Param group {number} of optimizer {index}: its parameters {came} the saved"
                " optimizer, so it keeps the learning rate and other options of"
                " `configure_optimizers`."
            )
    mine = {name for members in names for name in members}
    fresh, dropped = sorted(mine - saved_in.keys()), sorted(saved["state"].keys() - mine)
    if fresh:
        remarks.append(
            f"Optimizer {index} starts without state for {_some(fresh)}, which the saved one did"
            " not train."
        )
    if dropped:
        remarks.append(
            f"The saved state of {_some(dropped)} is not used: optimizer {index} does not train"
            " them."
        )
    return remarks


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )


def _load_group(
    engine: Zero3Engine,
    flat: FlatGroup,
    optimizer: Optimizer,
    by_name: State,
    elementwise: set[str],
    own_dtypes: bool = False,
) -> list[tuple[SavedTensor, SlicedTensor]]:
    mine = [
        place
        for place in places(engine).values()
        if place.entry.group is flat and place.entry.part is not None
    ]
    mine.sort(key=lambda place: place.entry.part.start)
    # Parameters with the same scalars (step counts) share a segment; the others need one of their
    # own.
    marks = [
        (place.entry.part.start, _signature(by_name.get(place.entry.name), elementwise))
        for place in mine
    ]
    flat.cut(
        [
            start
            for (start, mark), (_, before) in zip(marks[1:], marks, strict=False)
            if mark != before
        ]
    )
    reads: list[tuple[SavedTensor, SlicedTensor]] = []
    for segment in flat.segments:
        inside = [place for place in mine if segment.start <= place.entry.part.start < segment.stop]
        if inside and by_name.get(inside[0].entry.name):
            states = [by_name[place.entry.name] for place in inside]
            like = {
                key: value
                for key, value in states[0].items()
                if key in elementwise and isinstance(value, Tensor)
            }
            vectors = {key: [state[key] for state in states] for key in like}
            scalars = {key: value for key, value in states[0].items() if key not in like}
            optimizer.state[segment.parameter] = {
                **scalar_state(flat, optimizer, scalars),
                **_vector_state(flat, segment, inside, vectors, reads, own_dtypes),
            }
    return reads


def _signature(state: dict[str, Any] | None, vectors: set[str]) -> Any:
    if not state:
        return None
    return {
        k: getattr(v, "dtype", v) if k in vectors else float(v) if isinstance(v, Tensor) else v
        for k, v in state.items()
    }


def _elementwise(value: Any) -> bool:
    return isinstance(value, SlicedTensor) or (isinstance(value, Tensor) and len(value.shape) > 0)


def _elementwise_keys(by_name: State) -> set[str]:
    """Keys under which parameters have a value for each element. A parameter without dimensions
    does not show that itself.
    """
    found = {
        key for state in by_name.values() for key, value in state.items() if _elementwise(value)
    }
    tensors = {
        key
        for state in by_name.values()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    return found or tensors - {"step"}


def _vector_state(
    flat: FlatGroup,
    segment: Segment,
    inside: list[Place],
    vectors: dict[str, list[Tensor]],
    reads: list[tuple[SavedTensor, SlicedTensor]],
    own_dtypes: bool,
) -> dict[str, Tensor]:
    result = {}
    for key, sources in vectors.items():
        # What is loaded gets dtypes and devices as `Optimizer.load_state_dict` chooses them.
        floating = (
            not own_dtypes and flat.data.is_floating_point() and sources[0].dtype.is_floating_point
        )
        dtype = flat.data.dtype if floating else sources[0].dtype
        result[key] = torch.zeros(
            segment.stop - segment.start, dtype=dtype, device=flat.data.device
        )
        for place, source in zip(inside, sources, strict=True):
            _check_shape(place, key, source)
            target = place.slice_within(result[key], segment.start)
            if isinstance(source, Described):
                reads.append((source, target))
            else:
                target.fill(source)
    return result


def scalar_state(flat: FlatGroup, optimizer: Optimizer, scalars: dict[str, Any]) -> dict[str, Any]:
    """Copies of what the optimizer knows of a group's parameters beside elementwise tensors, where
    it will look for them.
    """
    group = optimizer.param_groups[flat.key.group]
    steps_on_device = group.get("fused") or group.get("capturable")
    result = {}
    for key, value in scalars.items():
        device = flat.data.device if steps_on_device or key != "step" else "cpu"
        result[key] = value.to(device, copy=True) if isinstance(value, Tensor) else value
    return result


def _check_shape(place: Place, key: str, source: Tensor) -> None:
    if source.shape != place.entry.size:
        raise ValueError(
            f"Optimizer state {key!r} of parameter {place.entry.name!r} has shape"
            f" {tuple(source.shape)}, the parameter has {tuple(place.entry.size)}."
        )


def _segments_with_state(
    group: FlatGroup, state: _FlatState
) -> Iterator[tuple[Segment, dict[str, Any]]]:
    for segment in group.segments:
        if segment.parameter in state:
            yield segment, unguarded(state[segment.parameter])
