"""Full tensors out of slices, gathered tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor

from .slices import TensorDescription


def replace_tensors(tree: Any, change: Callable[[Any], Any]) -> Any:
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


def tensors_in(tree: Any) -> dict[int, Any]:
    """Return every slice and saved tensor in nested dicts and lists once, in order, by ``id``."""
    found: dict[int, Tensor] = {}
    replace_tensors(tree, lambda tensor: found.setdefault(id(tensor), tensor))
    return found


def gather_on_rank_zero(tree: Any, rank: int) -> Any:
    """Return ``tree`` with every slice gathered on rank 0, None elsewhere; collective.

    Args:
        tree: has the same slices on all ranks, in the same order. They are gathered one at a time,
            and one that stands at several places (tied parameters) once.
        rank: of this process. On rank 0 the full tensors have CPU memory of their own.
    """
    values: dict[int, Tensor] = {}
    for key, tensor in tensors_in(tree).items():
        value = tensor.gather_values()
        if rank == 0:
            values[key] = value.to("cpu", copy=True)
    return replace_tensors(tree, lambda tensor: values[id(tensor)]) if rank == 0 else None
