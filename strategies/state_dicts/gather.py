"""Whole tensors out of slices, gathered unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..engine.unit import Unit
from .slices import Described, Flats, OwnedTensor, SlicedTensor

T = TypeVar("T", bound=Tensor)


def tensors_in(tree: Any, kind: type[T]) -> Iterator[T]:
    """Every tensor of a kind in nested dicts and lists, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(item, kind)


def replace(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """The nested dicts and lists with every slice and saved tensor changed; what holds none is kept
    as it is.
    """
    if isinstance(tree, Described):
        return change(tree)
    if isinstance(tree, dict):
        new: Any = {key: replace(item, change) for key, item in tree.items()}
        return tree if all(new[key] is tree[key] for key in tree) else new
    if type(tree) in (list, tuple):
        new = type(tree)(replace(item, change) for item in tree)
        return tree if all(a is b for a, b in zip(new, tree, strict=True)) else new
    return tree


def gather(tree: Any, rank: int, take: Callable[[SlicedTensor, Tensor], None]) -> None:
    """Gather every slice in ``tree``, one unit at a time; collective.

    Args:
        tree: has the same slices on all ranks.
        rank: this one; rank 0 gets the values.
        take: called on rank 0 with each slice and its whole value, which it must copy.
    """
    batches: dict[Flats, dict[tuple[Unit, torch.dtype], list[SlicedTensor]]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors_in(tree, SlicedTensor)}.values():
        if isinstance(tensor, OwnedTensor):
            value = tensor.whole()
            if rank == 0:
                take(tensor, value)
            continue
        batches.setdefault(tensor.flats, {}).setdefault(
            (tensor.place.unit, tensor.dtype), []
        ).append(tensor)
    for flats, units in batches.items():
        for (unit, dtype), tensors in units.items():
            whole = unit.full(flats, dtype)
            if rank == 0:
                for tensor in tensors:
                    take(tensor, whole[tensor.place.entry.name])


def gather_on_rank_zero(tree: Any, rank: int) -> Any:
    """``tree`` with every slice whole, in CPU memory of its own on rank 0; None elsewhere;
    collective.
    """
    values: dict[int, Tensor] = {}
    gather(
        tree, rank, lambda tensor, whole: values.update({id(tensor): whole.to("cpu", copy=True)})
    )
    return replace(tree, lambda tensor: values[id(tensor)]) if rank == 0 else None
