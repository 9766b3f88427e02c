"""One file with everything, as one device writes it, written and read by all ranks at once.

``torch.save`` writes the file with holes in the places of the tensors' values. When the ranks have
written those, rank 0 adds the checksums, which they computed. A rank that loads the file reads its
own parts of the tensors, through a mapping, and compares its share of the checksums.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from ..data import add_entries, own_entries
from ..state_dicts.collective_errors import CheckpointError, rank_and_world_size, run_on_all_ranks
from ..state_dicts.gather import replace_tensors, tensors_in
from ..state_dicts.optimizer_state import name_parameters, number_parameters
from .regions import ParallelSave, Place, allocate
from .storage import commit, damage
from .zip_file import Piece, changed, read_records, write_checksums

_SMALL = 1 << 16  # bytes


class FileSave(ParallelSave):
    """Write a Lightning checkpoint to one file."""

    @override
    def reserve(self, tree: Any, stage: Path) -> Iterable[tuple[Tensor, Place]]:
        slices = tensors_in(tree)
        with FakeTensorMode():
            fakes = {
                key: torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu")
                for key, tensor in slices.items()
            }
        skeleton = replace_tensors(tree, lambda tensor: fakes[id(tensor)])
        places: list[tuple[Tensor, Place]] = []
        storages: dict[str, torch.UntypedStorage] = {}
        # hazard: others may put something else under this name. The file is a new one, and is not
        # opened again to find the places in it.
        with open(stage, "x+b") as stream:
            with skip_data(materialize_fake_tensors=True):
                torch.save(skeleton, stream, pickle_module=_pickle_noting(storages))
            allocate(stream, stream.seek(0, os.SEEK_END))
            records = {
                record.name.partition("/data/")[2]: record for record in read_records(stream)
            }
        found = {fake.untyped_storage()._cdata: slices[key] for key, fake in fakes.items()}
        for number, storage in storages.items():
            # as it lies there: a conjugated view says so in the file
            tensor = found.get(storage._cdata)
            if tensor is None:
                tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            places.append((tensor, Place("", records[number].start)))
        return places

    @override
    def complete(self, stage: Path, pieces: list[Piece]) -> None:
        write_checksums(stage, pieces)
        commit(stage, self.path)


def _pickle_noting(storages: dict[str, torch.UntypedStorage]) -> Any:
    """Return a pickle module for ``torch.save`` that notes number of each record -> storage."""

    class Pickler(pickle.Pickler):
        def __init_subclass__(cls) -> None:
            # torch's subclass numbers storages in `persistent_id`
            number: Any = cls.persistent_id

            def persistent_id(self: Any, obj: Any) -> Any:
                found = number(self, obj)
                if found is not None:
                    storages[found[2]] = getattr(obj, "_untyped_storage", obj)
                return found

            cls.persistent_id = persistent_id  # type: ignore[method-assign]

    return SimpleNamespace(Pickler=Pickler, __name__=pickle.__name__)


def number_states(checkpoint: dict[str, Any]) -> None:
    """Number the parameters of optimizer states, as torch's own do, and save their names beside.

    In a run whose optimizers are others, state follows the names.
    """
    if "optimizer_states" in checkpoint:
        states = checkpoint["optimizer_states"]
        names = [[group["params"] for group in state["param_groups"]] for state in states]
        add_entries(checkpoint, optimizer_names=names)
        checkpoint["optimizer_states"] = [number_parameters(state) for state in states]


def named_states(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the optimizer states of a loaded checkpoint, with names where it says them."""
    states = checkpoint["optimizer_states"]
    all_names = own_entries(checkpoint).get("optimizer_names", [])
    if len(states) != len(all_names):
        return states  # a hook changed them, or another program wrote them
    return [name_parameters(*pair) for pair in zip(states, all_names, strict=True)]


def load(path: Path, weights_only: bool) -> dict[str, Any]:
    """Open a checkpoint's file, whose tensors are mapped and read when they are used; collective.

    Raises:
        CheckpointError: on all ranks, if the file cannot be read or is not as it was written.
    """
    checkpoint: dict[str, Any] = {}

    def open_file() -> None:
        # each rank compares the checksums of its share of the records
        if fault := damage(path) or changed(path, *rank_and_world_size()):
            raise CheckpointError(fault)
        checkpoint.update(read(path, weights_only))

    run_on_all_ranks(f"Loading {path}", open_file)
    return checkpoint


def read(path: Path, weights_only: bool, is_mapped: bool = True) -> dict[str, Any]:
    """Open a file without comparing checksums; local.

    Args:
        path: of the file.
        weights_only: see :class:`~.options.CheckpointOptions`.
        is_mapped: tensors are mapped, but small ones of a checkpoint that are neither weights nor
            optimizer states: callbacks may keep them, and the file with them, after it was deleted.

    Raises:
        CheckpointError: it is no checkpoint, or ``weights_only`` forbids what it holds.
    """
    is_zip = zipfile.is_zipfile(path)
    is_mapped &= is_zip
    if is_zip:
        with open(path, "rb") as stream:
            read_records(stream)  # raises if one grows
    try:
        content = torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=weights_only)
    except OSError:
        raise
    except Exception as error:  # a file of anything raises nearly anything
        # between a preface and links of torch's
        reason = str(error).partition("WeightsUnpickler error: ")[2].strip()
        reason = reason.partition("\n")[0].partition(". ")[0]
        raise CheckpointError(
            f"{path} is no checkpoint of tensors and plain values ({reason or repr(error)}). If it"
            " has more and you trust its source: CheckpointOptions(weights_only=False)."
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no checkpoint: it holds a {type(content).__name__}.")
    for key in content if is_mapped and "state_dict" in content else ():
        if key not in ("state_dict", "optimizer_states"):
            content[key] = tree_map_only(Tensor, _unmapped, content[key])
    return content


def _unmapped(tensor: Tensor) -> Tensor:
    is_small = tensor.numel() * tensor.itemsize <= _SMALL  # also of a sparse one
    is_plain = type(tensor) is Tensor and not tensor.requires_grad
    return tensor.clone() if is_plain and is_small else tensor
