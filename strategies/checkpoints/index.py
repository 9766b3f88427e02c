"""Read the index of a sharded checkpoint without trusting whoever wrote it.

The index, `.metadata`, is a pickle of torch's own dataclasses. No name in it is looked up: a class
of this reading alone stands for each class and function, so that what the pickle calls or changes
is nobody else's. Torch's dataclasses are then made of what the stand-ins were given, and types,
sizes and file names are compared with what torch writes.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..state_dicts.collective_errors import CheckpointError
from .manifest import INDEX, is_file_name
from .stand_ins import StandInUnpickler


def read_index(folder: Path) -> Metadata:
    """Read the index of a sharded checkpoint. No code that the index names runs.

    Raises:
        CheckpointError: it is not what torch writes, or it names files outside of the folder.
    """
    data = (folder / INDEX).read_bytes()
    try:
        return _metadata(_IndexUnpickler(io.BytesIO(data)).load())
    except Exception as error:  # a broken pickle raises nearly anything
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{INDEX} is no index as torch writes it: {what[:200]!a}. If you trust its source, read"
            " it with CheckpointOptions(weights_only=False)."
        ) from error


class _IndexUnpickler(StandInUnpickler):
    """Takes no other opcodes than torch's index has: some take any memory, or open caches."""


_OPCODES = (
    "PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINUNICODE"
    " SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT"
    " SETITEM SETITEMS BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE"
    " NEWOBJ BUILD"
).split()
_CODES = [getattr(pickle, name)[0] for name in _OPCODES]
_IndexUnpickler.dispatch = {code: StandInUnpickler.dispatch[code] for code in _CODES}


def _metadata(index: Any) -> Metadata:
    """Make torch's dataclasses of stand-ins. What these lack is an error of any type.

    Whoever wrote the index chose the values, too. So it is compared only as far as it could take
    memory that no file has, or reach other files.
    """
    tensors = {name: _kind(name, kind) for name, kind in index.state_dict_metadata.items()}
    places = dict(_place(key, place) for key, place in index.storage_data.items())
    _compare_sizes(tensors, places)
    paths = index.planner_data or {}
    known = {name: paths[name] for name in tensors if name in paths}
    for name, path in known.items():
        # A list cannot be longer than there are names; a larger index would take any memory.
        parts = [type(part) is str or (_is_count(part) and part < len(tensors)) for part in path]
        _require(all(parts), f"the nesting of {name!r} is no path")
    return Metadata(tensors, known, places)


def _require(is_right: bool, fault: str) -> None:
    if not is_right:
        raise ValueError(fault)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _size(value: Any) -> torch.Size:
    size = torch.Size(*value.arguments)  # raises if an item is no integer
    _require(min(size, default=0) >= 0, "a size is negative")
    return size


def _kind(name: Any, kind: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    _require(type(name) is str, "it has no names of tensors")
    if type(kind).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    dtype: Any = vars(torch).get(kind.properties.arguments[0].__name__)
    _require(type(dtype) is torch.dtype, f"{name} has no dtype")
    size = _size(kind.size)
    chunks = [ChunkStorageMetadata(_size(c.offsets), _size(c.sizes)) for c in kind.chunks]
    # two in one place count once
    elements = sum({chunk.offsets: math.prod(chunk.sizes) for chunk in chunks}.values())
    of = f"{elements:,} of {math.prod(size):,} elements"
    _require(elements == math.prod(size), f"{name} has chunks of {of}")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _place(key: Any, place: Any) -> tuple[MetadataIndex, _StorageInfo]:
    offset = vars(key).get("offset")
    index = MetadataIndex(key.fqn, None if offset is None else _size(offset))
    file, numbers = place.relative_path, (place.offset, place.length)
    _require(all(map(_is_count, numbers)), f"{index.fqn} has no place")
    where = f"{index.fqn} lies in {file!r}"
    _require(is_file_name(file), f"{where}, which is no name of a file in the folder")
    return index, _StorageInfo(file, *numbers)


def _compare_sizes(tensors: dict[str, Any], places: dict[MetadataIndex, _StorageInfo]) -> None:
    """Compare what tensors take with what files have for them.

    A reader makes room for the tensors before it reads them.
    """
    nowhere = _StorageInfo("", 0, 0)
    for name, kind in tensors.items():
        for chunk in kind.chunks if isinstance(kind, TensorStorageMetadata) else ():
            room = places.get(MetadataIndex(name, chunk.offsets), nowhere).length
            size = math.prod(chunk.sizes) * kind.properties.dtype.itemsize
            _require(room >= size, f"{name} has {room:,} bytes for a chunk of {size:,} bytes")
    end, last = 0, ""
    for file, begin, length in sorted(
        (place.relative_path, place.offset, place.length) for place in places.values()
    ):
        is_free = file != last or begin >= end
        _require(is_free, f"{file} has two values at byte {begin:,}")
        end, last = begin + length, file
