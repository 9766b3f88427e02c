"""Full tensors out of slices, gathered unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, TypeVar

from torch import Tensor

from .slices import SlicedTensor, TensorDescription

T = TypeVar("T", bound=Tensor)


def tensors_in(tree: Any, kind: type[T]) -> Iterator[T]:
    """Yield every tensor of a kind in nested dicts and lists, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(item, kind)


def replace_tensors(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply ``change`` to every slice and saved tensor in nested dicts and lists.

    A container without any of these is returned itself, not a copy.
    """
    if isinstance(tree, TensorDescription):
        return change(tree)
    if isinstance(tree, dict):
        new: Any = {key: replace_tensors(item, change) for key, item in tree.items()}
        if all(new[key] is tree[key] for key in tree):
            return tree
        result = copy(tree)  # of the same class; a state dict has attributes, too
        result.update(new)
        return result
    if type(tree) in (list, tuple):
        new = type(tree)(replace_tensors(item, change) for item in tree)
        return tree if all(a is b for a, b in zip(new, tree, strict=True)) else new
    return tree


def gather_slices(tree: Any, rank: int, receive: Callable[[SlicedTensor, Tensor], Any]) -> None:
    """Gather every slice in ``tree``, one at a time; collective.

    Args:
        tree: has the same slices on all ranks, in the same order.
        rank: of this process; rank 0 gets the values.
        receive: called on rank 0 with each slice and its full value, which it must copy.
    """
    # a slice that stands at several places (tied parameters) is gathered once
    for tensor in {id(tensor): tensor for tensor in tensors_in(tree, SlicedTensor)}.values():
        value = tensor.gather_values()
        if rank == 0:
            receive(tensor, value)


def gather_on_rank_zero(tree: Any, rank: int) -> Any:
    """Return ``tree`` with every slice gathered on rank 0, None elsewhere; collective.

    The full tensors have CPU memory of their own.
    """
    values: dict[int, Tensor] = {}
    gather_slices(
        tree, rank, lambda tensor, value: values.update({id(tensor): value.to("cpu", copy=True)})
    )
    return replace_tensors(tree, lambda tensor: values[id(tensor)]) if rank == 0 else None
