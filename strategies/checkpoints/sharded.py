"""Directories in the format of torch.distributed.checkpoint: written by all ranks, read by any number of ranks.

The layout is the one of Lightning's ``ModelParallelStrategy`` (FSDP2)::

    .metadata          which part of which tensor lies where
    __0_0.distcp, ...  the parts that rank 0, ... wrote
    meta.pt            everything that is no weight and no optimizer state: loops, callbacks, loaders, random states, ...

and so are the names in it: ``state_dict.<key>``, ``optimizer_<index>.state.<parameter>.<key>`` and
``optimizer_<index>.param_groups.<index>.<option>``.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from .slices import SavedTensor

INDEX = ".metadata"


def write(state: Mapping[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's part of a nested state into ``folder``; collective.

    Args:
        state: tensors, :class:`~.slices.SlicedTensor` and plain values; what several ranks have, the first of them writes.
        folder: empty, on a file system that all ranks see.
        group: the ranks that write; all of them by default.
    """
    with _quiet():
        # Buffers may differ between ranks (running statistics do): rank 0's count, as in every other strategy.
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        dcp.save(dict(state), storage_writer=FileSystemWriter(folder), planner=planner, process_group=group)


class ShardedCheckpoint:
    """An open directory.

    Args:
        folder: the directory.
        weights_only: refuse everything but tensors and plain values.
    """

    def __init__(self, folder: Path, weights_only: bool = True) -> None:
        self.folder, self._weights_only = folder, weights_only
        self._metadata = _Reader(folder, weights_only).read_metadata()

    def names(self) -> list[str]:
        """Names of all entries."""
        return list(self._metadata.state_dict_metadata)

    def state(self) -> dict[str, Any]:
        """The nested state as it was saved, with a :class:`SavedTensor` for each tensor that has dimensions; collective."""
        values: dict[str, Any] = {}
        for name, kind in self._metadata.state_dict_metadata.items():
            if not isinstance(kind, TensorStorageMetadata):
                values[name] = None
            elif not kind.size:
                values[name] = torch.empty((), dtype=kind.properties.dtype)
        self._load(values)
        nested: dict[str, Any] = {}
        for name, kind in self._metadata.state_dict_metadata.items():
            value = values[name] if name in values else SavedTensor(name, kind.size, kind.properties.dtype)
            set_element(nested, (self._metadata.planner_data or {}).get(name, (name,)), value)
        return nested

    def read(self, wanted: Iterable[tuple[SavedTensor, Tensor]]) -> None:
        """Fill this rank's tensors, or its parts of :class:`~.slices.SlicedTensor`, with saved values; collective.

        Values are converted to the dtype of the tensor that they are read into.
        """
        rounds: list[dict[str, Tensor]] = [{}]
        for saved, target in wanted:
            free = next((r for r in rounds if saved.name not in r), None)  # one tensor may be wanted twice
            if free is None:
                rounds.append(free := {})
            free[saved.name] = target
        everyone: list[int] = [len(rounds)]
        if dist.is_initialized():
            everyone = [0] * dist.get_world_size()
            dist.all_gather_object(everyone, len(rounds))
        for number in range(max(everyone)):
            self._load(rounds[number] if number < len(rounds) else {})

    def _load(self, targets: dict[str, Any]) -> None:
        with _quiet():
            dcp.load(
                targets,
                storage_reader=_Reader(self.folder, self._weights_only),
                planner=_LoadPlanner(self._weights_only),
            )


@contextmanager
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _LoadPlanner(DefaultLoadPlanner):
    """Names are taken as they stand in the index, and plain values are read safely."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=self._weights_only)


class _Reader(FileSystemReader):
    """Reads the index, which is a pickle, without running code that it names."""

    def __init__(self, folder: Path, weights_only: bool) -> None:
        super().__init__(folder)
        self._weights_only = weights_only

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if not self._weights_only:
            return super().read_metadata(*args, **kwargs)
        with open(Path(self.path) / INDEX, "rb") as file:
            metadata = _IndexUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


# What torch writes into an index.
_INDEX_NAMES = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _INDEX_NAMES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(
            f"the index names {module}.{name}, which torch does not write there. If you trust the source, read it with "
            "CheckpointOptions(weights_only=False)."
        )
