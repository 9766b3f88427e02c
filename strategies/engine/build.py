"""Set-up: from a whole model and its optimizers to units and shards, unit by unit, so that a device
never holds it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..collectives import LocalCollectives, digest
from .chunk import Chunk, Entry
from .layout import ChunkLayout
from .offload import Offload
from .partition import UnitModules
from .sharded import is_sharded, read
from .unit import Unit, WholeUnit

SlotDtype = Callable[[str, nn.Parameter], torch.dtype]
Initialize = Callable[[Iterable[tuple[str, nn.Parameter]]], None]


def trained_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> set[int]:
    """The ``id`` of each parameter that an optimizer has.

    A ValueError if an optimizer holds a tensor that is no parameter of ``model``.
    """
    known, trained = set(map(id, model.parameters())), set[int]()
    for optimizer in optimizers:
        for p in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            if id(p) not in known:
                raise ValueError(
                    f"{type(optimizer).__name__} holds a tensor of shape {tuple(p.shape)} that is"
                    f" not a parameter of {type(model).__name__}.\nPass only parameters that"
                    " `named_parameters()` of the module yields."
                )
            trained.add(id(p))
    return trained


def build_units(
    parts: Sequence[UnitModules],
    trained: set[int],
    slot_dtype: SlotDtype,
    collectives: LocalCollectives,
    unit_class: type[Unit] = Unit,
    offload: Offload | None = None,
) -> list[Unit]:
    """Lay every unit out; nothing is allocated yet."""
    units = []
    budget = 0 if offload is None else offload.budget
    for index, part in enumerate(parts):
        buckets: dict[tuple[bool, torch.dtype, torch.dtype], list[Entry]] = {}
        for name, p in part.parameters.items():
            _check_parameter(name, p)
            is_trained = id(p) in trained and (p.is_floating_point() or p.is_complex())
            # a single rank unshards nothing: its parameters view their shards
            slot = p.dtype if collectives.alone else slot_dtype(name, p)
            bucket = buckets.setdefault((is_trained, slot, p.dtype), [])
            bucket.append(Entry(name, p, is_trained))
        chunks = [
            _chunk(bucket, dtypes, collectives.world_size)
            for (_, *dtypes), bucket in buckets.items()
        ]
        if offload is not None:
            budget -= sum(map(offload.cost, chunks))
            if budget < 0:
                chunks = [offload.place(chunk) for chunk in chunks]
        kind = WholeUnit if collectives.alone else unit_class
        units.append(kind(index, part, chunks))
    end = 0
    for chunk in (chunk for unit in units for chunk in unit.chunks if chunk.trained):
        start = end
        for entry in chunk.entries:
            entry.number, end = end, end + 1
        chunk.numbers = slice(start, end)
    return units


def _chunk(entries: list[Entry], dtypes: list[torch.dtype], world_size: int) -> Chunk:
    itemsize = min(dtype.itemsize for dtype in dtypes)
    layout = ChunkLayout.build([e.size.numel() for e in entries], world_size, itemsize)
    return Chunk(entries, layout, *dtypes)


def _check_parameter(name: str, p: nn.Parameter) -> None:
    # A wrapper of other tensors calls itself a parameter, but has no memory of its own.
    wraps = (
        nn.Parameter not in type(p).__mro__
        or type(p).__torch_dispatch__ is not Tensor.__torch_dispatch__
    )
    if wraps or p.layout != torch.strided:
        raise ValueError(
            f"Parameter {name!r} is a {type(p).__name__} with layout {p.layout}; only dense"
            " parameters can be sharded. Make it a dense `nn.Parameter`, or a buffer if it is not"
            " trained; take `fully_shard` and other wrappers out of the model."
        )


def check_memory(model: nn.Module) -> None:
    """A ValueError if a parameter begins where another, a buffer or a tensor in an attribute of a
    module does.

    These would see its changes until it is sharded, but not after.
    """
    attributes = (
        (f"{prefix}.{name}".lstrip("."), value)
        for prefix, module in model.named_modules()
        for name, value in vars(module).items()
        # some are made anew before each forward (`nn.utils.spectral_norm`)
        if type(value) is Tensor and f"{name}_orig" not in module._parameters
    )
    seen: dict[int, str] = {}  # address -> parameter
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *attributes):
        is_elsewhere = is_sharded(tensor) or tensor.is_meta or tensor.layout != torch.strided
        if is_elsewhere or not tensor.numel():
            continue
        if (other := seen.get(tensor.data_ptr())) is not None:
            raise ValueError(
                f"{name!r} and {other!r} share memory, and after sharding they would not. To"
                " tie two layers let both have the same parameter (`head.weight ="
                " embedding.weight`, without `.data`), else use `.clone()`."
            )
        if isinstance(tensor, nn.Parameter):
            seen[tensor.data_ptr()] = name


def check_same_structure(
    units: list[Unit],
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    collectives: LocalCollectives,
) -> None:
    """Raise a ValueError on every rank that names the first difference in parameters, units, param
    groups or buffers; collective.
    """
    groups = {
        id(p): f"{i}.{g}"
        for i, optimizer in enumerate(optimizers)
        for g, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    mine = [
        f"{e.name}: shape {tuple(e.size)}, {e.dtype}, {'trained' if e.trained else 'not trained'}, "
        f"requires_grad {e.parameter.requires_grad}, param group {groups.get(id(e.parameter))},"
        f" unit {u.name}"
        for u in units
        for e in u.entries
    ]
    mine += [
        f"buffer {name}: shape {tuple(b.shape)}, {b.dtype}" for name, b in model.named_buffers()
    ]
    if len(set(collectives.all_gather_object(digest(mine)))) == 1:
        return
    everyone = collectives.all_gather_object(mine)
    for rank, theirs in enumerate(everyone):
        for a, b in zip([*everyone[0], "nothing"], [*theirs, "nothing"], strict=False):
            if a != b:
                raise ValueError(
                    f"The ranks have different models. First difference: rank 0 has [{a}], rank"
                    f" {rank} has [{b}]. Build the same model and optimizers on every rank."
                )


def fill_shards(
    units: list[Unit],
    collectives: LocalCollectives,
    device: torch.device,
    initialize: Initialize,
) -> None:
    """Cut every unit into shards, from rank 0's values, whatever the other ranks initialised;
    collective.
    """
    for unit in units:
        initialize((entry.name, entry.parameter) for entry in unit.entries)
        for chunk in unit.chunks:
            buffer = torch.zeros(chunk.layout.numel, dtype=chunk.master_dtype, device=device)
            parameters = [entry.parameter for entry in chunk.entries]
            earlier = [p for p in parameters if is_sharded(p)]  # for another engine
            with torch.no_grad():
                values = dict(zip(earlier, read(earlier), strict=True))
                for parameter, view in zip(parameters, chunk.views(buffer), strict=True):
                    view.copy_(values.get(parameter, parameter))
                collectives.broadcast(buffer)
            chunk.own(chunk.shard_of(buffer, collectives.rank).clone(), collectives.rank)
            for entry in chunk.entries:
                vars(entry.parameter).pop("zero3_entry", None)
                entry.parameter.__class__ = entry.cls
                entry.parameter.data = torch.empty(
                    0, dtype=entry.dtype, device=entry.parameter.device
                )
