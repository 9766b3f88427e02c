"""Read the index of a sharded checkpoint without trusting whoever wrote it.

The index, `.metadata`, is a pickle of torch's own dataclasses. Limiting the names in a pickle is
not enough: opcode BUILD sets attributes of whatever lies on the stack, and a class may lie there.
Here only an instance of a listed dataclass gets a state, and only a listed constructor is called.
What was read is then compared with what torch writes: types, sizes and file names.
"""

from __future__ import annotations

import io
import math
import pathlib
import pickle
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from ..state_dicts.collective_errors import CheckpointError
from .manifest import INDEX, is_file_name

# Instances of these get the state that the index gives them. Their attributes are its fields.
_STATEFUL = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
_PATHS = ("Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")


def _member(enumeration: Any, name: str) -> Any:
    """Stand in for ``getattr``, by which Python 3.11.0 to 3.11.3 pickle members of enumerations."""
    if enumeration is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it names an attribute of a {type(enumeration).__name__}")
    return _MEM_FORMAT_ENCODING[name]


# (module, name) -> what the index may call. Python 3.13 has moved the paths to a module of their
# own; they become pure ones, which cannot touch a file.
_CALLABLE: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    ("__builtin__", "getattr"): _member,  # its name in the second protocol
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
    **{
        (module, name): pathlib.PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for name in _PATHS
    },
}
_NAMES = {**_CALLABLE, **{(cls.__module__, cls.__name__): cls for cls in _STATEFUL}}


def read_index(folder: Path) -> Metadata:
    """Read the index of a sharded checkpoint. No code that the index names runs.

    Raises:
        CheckpointError: it is not what torch writes, or it names files outside of the folder.
    """
    data = (folder / INDEX).read_bytes()
    try:
        metadata = _IndexUnpickler(io.BytesIO(data)).load()
        for fault in _faults(metadata):
            raise pickle.UnpicklingError(fault)
    except Exception as error:  # a broken pickle raises nearly anything
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{INDEX} is no index as torch writes it: {what[:200]!a}. If you trust its source, read"
            " it with CheckpointOptions(weights_only=False)."
        ) from error
    return metadata


class _IndexUnpickler(pickle._Unpickler):
    """Interprets the opcodes that torch's index consists of.

    This is Python's own unpickler in Python, because the opcodes of the one in C cannot be changed.
    """

    stack: list[Any]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES:
            return _NAMES[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which torch does not write there")

    def load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack[-1]
        if type(arguments) is not tuple or not any(function is f for f in _CALLABLE.values()):
            raise pickle.UnpicklingError(f"it calls a {type(function).__name__}")
        self.stack[-1] = function(*arguments)

    def load_newobj(self) -> None:
        arguments, cls = self.stack.pop(), self.stack.pop()
        if arguments != () or not any(cls is known for known in _STATEFUL):
            raise pickle.UnpicklingError(f"it makes an instance of a {type(cls).__name__}")
        self.stack.append(object.__new__(cls))

    def load_build(self) -> None:
        state, instance = self.stack.pop(), self.stack[-1]
        cls = type(instance)
        if not any(cls is known for known in _STATEFUL):
            raise pickle.UnpicklingError(f"it changes a {cls.__name__}")
        if cls is TensorProperties:
            instance.__setstate__(state)  # of a tuple
        elif type(state) is dict and state.keys() <= {field.name for field in fields(cls)}:
            vars(instance).update(state)
        else:
            raise pickle.UnpicklingError(f"it sets other attributes of a {cls.__name__}")


_OPCODES = (
    "PROTO FRAME STOP MARK POP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINUNICODE"
    " SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT"
    " SETITEM SETITEMS BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE"
    " NEWOBJ BUILD"
).split()
_HANDLERS = pickle._Unpickler.dispatch
_IndexUnpickler.dispatch = {
    code: getattr(_IndexUnpickler, _HANDLERS[code].__name__)
    for code in (getattr(pickle, name)[0] for name in _OPCODES)
}


def _faults(metadata: Any) -> Iterator[str]:
    """Yield what is not as torch writes it."""
    if type(metadata) is not Metadata:
        yield f"it is a {type(metadata).__name__}"
        return
    tensors, places = _get(metadata, "state_dict_metadata"), _get(metadata, "storage_data")
    if type(tensors) is not dict or not all(type(name) is str for name in tensors):
        yield "it has no names of tensors"
        return
    for name, kind in tensors.items():
        if type(kind) is TensorStorageMetadata:
            yield from _tensor_faults(name, kind)
        elif type(kind) is not BytesStorageMetadata:
            yield f"{name} is a {type(kind).__name__}"
    if type(places) is not dict:
        yield "it has no places in files"
        return
    for index, place in places.items():
        yield from _place_faults(index, place, tensors)
    yield from _size_faults(tensors, places)
    yield from _path_faults(_get(metadata, "planner_data"), tensors)


def _get(instance: Any, name: str) -> Any:
    return vars(instance).get(name)


def _is_size(value: Any, dimensions: int) -> bool:
    # torch.Size holds integers and nothing else
    return type(value) is torch.Size and len(value) == dimensions and min(value, default=0) >= 0


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_chunk(value: Any) -> bool:
    return type(value) is ChunkStorageMetadata


def _tensor_faults(name: str, kind: TensorStorageMetadata) -> Iterator[str]:
    properties, size, chunks = (_get(kind, field) for field in ("properties", "size", "chunks"))
    if (
        type(properties) is not TensorProperties
        or type(_get(properties, "dtype")) is not torch.dtype
    ):
        yield f"{name} has no dtype"
    if type(size) is not torch.Size or not _is_size(size, len(size)):
        yield f"{name} has no shape"
        return
    elements, starts = 0, []
    for chunk in chunks if type(chunks) is list else [None]:
        places = [_get(chunk, field) for field in ("offsets", "sizes")] if _is_chunk(chunk) else []
        if not places or not all(_is_size(place, len(size)) for place in places):
            yield f"{name} has no chunks"
            return
        if any(at + n > whole for at, n, whole in zip(*places, size, strict=True)):
            yield f"{name} has a chunk outside of its shape"
        elements += math.prod(places[1])
        starts.append(places[0])
    if len(set(starts)) < len(starts):
        yield f"{name} has two chunks in one place"
    if elements != math.prod(size):
        yield f"{name} has chunks of {elements:,} of {math.prod(size):,} elements"


def _place_faults(index: Any, place: Any, tensors: dict[str, Any]) -> Iterator[str]:
    if type(index) is not MetadataIndex or _get(index, "fqn") not in tensors:
        yield "it has a place for what is no tensor of its own"
        return
    if type(place) is not _StorageInfo:
        yield f"{index.fqn} has no place"
        return
    file, *numbers = (_get(place, field) for field in ("relative_path", "offset", "length"))
    if not all(map(_is_count, numbers)):
        yield f"{index.fqn} has no place"
    if _get(place, "transform_descriptors"):  # torch writes none unless it is told to
        yield f"{index.fqn} is stored in another form"
    if not is_file_name(file):
        yield f"{index.fqn} lies in {file!r}, which is no name of a file in the folder"


def _size_faults(
    tensors: dict[str, Any], places: dict[MetadataIndex, _StorageInfo]
) -> Iterator[str]:
    """Compare what tensors take with what files have for them, of types that were compared before.

    A reader makes room for the tensors before it reads them.
    """
    for name, kind in tensors.items():
        for chunk in kind.chunks if type(kind) is TensorStorageMetadata else ():
            place = places.get(MetadataIndex(name, chunk.offsets))
            size = math.prod(chunk.sizes) * kind.properties.dtype.itemsize
            if place is None or place.length < size:
                room = "no place" if place is None else f"{place.length:,} bytes"
                yield f"{name} has {room} for a chunk of {size:,} bytes"
    end, last = 0, ""
    for file, begin, length in sorted(
        (place.relative_path, place.offset, place.length) for place in places.values()
    ):
        if file == last and begin < end:
            yield f"{file} has two values at byte {begin:,}"
        end, last = begin + length, file


def _path_faults(paths: Any, tensors: dict[str, Any]) -> Iterator[str]:
    """Of the nesting that the flat names come from: {name: (key, index, ...)}."""
    if paths is None:
        return
    if type(paths) is not dict:
        yield "its nesting is no dict"
        return
    for name, path in paths.items():
        # A list cannot be longer than there are names; a larger index would take any memory.
        if (
            type(path) is not tuple
            or not path
            or type(path[0]) is not str
            or not all(
                type(part) is str or (_is_count(part) and part < len(tensors)) for part in path
            )
        ):
            yield f"the nesting of {name!r} is no path"
