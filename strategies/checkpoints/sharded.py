"""Directories in the format of torch.distributed.checkpoint: written by all ranks, read by any number of ranks.

The layout is the one of Lightning's ``ModelParallelStrategy`` (FSDP2)::

    .metadata          which part of which tensor lies where
    __0_0.distcp, ...  the parts that rank 0, ... wrote
    meta.pt            everything that is no weight and no optimizer state: loops, callbacks, loaders, random states, ...
    manifest.json      sizes and checksums of these files; ours alone

and so are the names in it: ``state_dict.<key>``, ``optimizer_<index>.state.<parameter>.<key>`` and
``optimizer_<index>.param_groups.<index>.<option>``.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from .errors import CheckpointError, together
from .gather import tensors_in
from .manifest import MANIFEST, Manifest, changed, damage, measure, shard_files
from .slices import SavedTensor, SlicedTensor
from .storage import commit, make_folder, remove

INDEX = ".metadata"
TRAINER_STATE = "meta.pt"
OTHERS = "others"  # sharded tensors that are neither the model's nor an optimizer's
_MARK = "zero3_sharded"  # {_MARK: name} in the trainer state stands for such a tensor


@dataclass
class Prepared:
    """What this rank is to write.

    Attributes:
        state: nested, with the rank's slices.
        rest: ``meta.pt``, which rank 0 writes.
        manifest: without files.
    """

    state: dict[str, Any]
    rest: bytes
    manifest: Manifest

    def copied(self) -> Prepared:
        """The same with CPU copies of all tensors, as they are now."""
        return replace(self, state=_copied(self.state, {}))


def prepare(checkpoint: dict[str, Any]) -> Prepared:
    """Take a Lightning checkpoint apart; local.

    Args:
        checkpoint: as Lightning makes it, with a :class:`~.slices.SlicedTensor` for each sharded tensor, wherever it is.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    state = {"state_dict": checkpoint["state_dict"]}
    for index, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        state[f"optimizer_{index}"] = optimizer
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    if any(True for _ in tensors_in(rest, SlicedTensor)):
        state[OTHERS] = {}  # averages of weights, and what else callbacks keep
        rest = _take_slices(rest, (), state[OTHERS])
    packed = io.BytesIO()
    if rank == 0:
        torch.save(rest, packed)
    manifest = Manifest(world_size, checkpoint.get("epoch", 0), checkpoint.get("global_step", 0))
    return Prepared(state, packed.getvalue(), manifest)


def _copied(tree: Any, memory: dict[int, Tensor]) -> Any:
    if isinstance(tree, SlicedTensor):
        return memory.setdefault(id(tree), tree.copied())
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: _copied(item, memory) for key, item in tree.items()}
    return type(tree)(_copied(item, memory) for item in tree) if type(tree) in (list, tuple) else tree


def save(prepared: Prepared, path: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint, every rank its part; collective.

    Args:
        prepared: this rank's part.
        path: of the directory, on a file system that all ranks see. What is there is replaced when the new one is whole.
        group: the ranks that write; all of them by default.

    Raises:
        CheckpointError: on all ranks; what was at ``path`` is still there.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    doing, manifest = f"Saving {path}", prepared.manifest
    stage = together(doing, lambda: _begin(path, manifest) if rank == 0 else None, group)[0]
    try:
        together(doing, lambda: _require_shared(stage), group)
        _write(prepared, stage, rank, doing, group)
        for files in together(doing, lambda: {f.name: measure(f) for f in _files_of(stage, rank)}, group):
            manifest.files.update(files)
        together(doing, lambda: _finish(manifest, stage, path) if rank == 0 else None, group)
    except CheckpointError:
        if rank == 0:
            remove(stage)
        raise


def _begin(path: Path, manifest: Manifest) -> Path:
    stage = make_folder(path)
    manifest.write(stage)
    return stage


def _require_shared(stage: Path) -> None:
    if not (stage / MANIFEST).is_file():
        raise CheckpointError(f"{stage} was created by rank 0 and is not there. All ranks must see the same file system.")


def _finish(manifest: Manifest, stage: Path, path: Path) -> None:
    manifest.write(stage)
    commit(stage, path)


def _files_of(stage: Path, rank: int) -> list[Path]:
    return [*shard_files(stage, rank), *([] if rank else [stage / INDEX, stage / TRAINER_STATE])]


def _write(prepared: Prepared, stage: Path, rank: int, doing: str, group: dist.ProcessGroup | None) -> None:
    # Buffers may differ between ranks (running statistics do): rank 0's count, as in every other strategy.
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with _torch_errors(doing):
        dcp.save(prepared.state, storage_writer=FileSystemWriter(stage), planner=planner, process_group=group)
    together(doing, lambda: None if rank else (stage / TRAINER_STATE).write_bytes(prepared.rest), group)


def _take_slices(tree: Any, path: tuple[str, ...], into: dict[str, Any]) -> Any:
    """``tree`` with every slice moved to ``into`` and a mark in its place."""
    if isinstance(tree, SlicedTensor):
        name = ".".join(path)
        into[name] = tree
        return {_MARK: name}
    if isinstance(tree, dict):
        return {key: _take_slices(item, (*path, str(key)), into) for key, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_take_slices(item, (*path, str(k)), into) for k, item in enumerate(tree))
    return tree


def _put_back(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Undo :func:`_take_slices`."""
    if isinstance(tree, dict):
        return tensors[tree[_MARK]] if tree.keys() == {_MARK} else {k: _put_back(item, tensors) for k, item in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_put_back(item, tensors) for item in tree)
    return tree


class ShardedCheckpoint:
    """An open directory.

    Args:
        folder: the directory.
        weights_only: refuse everything but tensors and plain values.

    Raises:
        CheckpointError: on all ranks, if a file is not as it was written.
    """

    def __init__(self, folder: Path, weights_only: bool = True) -> None:
        self.folder, self._weights_only = folder, weights_only
        together(f"Loading {folder}", self._open)

    def _open(self) -> None:
        if not (self.folder / INDEX).is_file():
            raise CheckpointError(f"it has no {INDEX} and is no checkpoint in torch's distributed format")
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        found = damage(self.folder) or changed(self.folder, rank, world_size)
        if found:
            raise CheckpointError(found)
        self._metadata = read_index(self.folder) if self._weights_only else FileSystemReader(self.folder).read_metadata()
        self._require_files()

    def _require_files(self) -> None:
        """Directories of other programs have no manifest, but their index tells how long the files must be."""
        needed: dict[str, int] = {}
        for entry in self._metadata.storage_data.values():
            needed[entry.relative_path] = max(needed.get(entry.relative_path, 0), entry.offset + entry.length)
        for name, size in needed.items():
            file = self.folder / name
            there = file.stat().st_size if file.is_file() else 0
            if there < size:
                raise CheckpointError(f"incomplete: {name} has {there:,} of {size:,} bytes")

    def checkpoint(self) -> dict[str, Any]:
        """The checkpoint as Lightning made it, with a :class:`~.slices.SavedTensor` for each tensor; collective."""
        state = self.state()
        rest: dict[str, Any] = {}
        together(f"Loading {self.folder}", lambda: rest.update(self._trainer_state()))
        checkpoint = {**_put_back(rest, state.pop(OTHERS, {})), "state_dict": state.pop("state_dict")}
        if state:
            checkpoint["optimizer_states"] = [state[f"optimizer_{index}"] for index in range(len(state))]
        return checkpoint

    def _trainer_state(self) -> dict[str, Any]:
        return torch.load(self.folder / TRAINER_STATE, map_location="cpu", weights_only=self._weights_only)

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
            value = values[name] if name in values else self._tensor(name, kind)
            set_element(nested, (self._metadata.planner_data or {}).get(name, (name,)), value)
        return nested

    def _tensor(self, name: str, kind: TensorStorageMetadata) -> SavedTensor:
        def read() -> Tensor:
            target = {name: torch.empty(kind.size, dtype=kind.properties.dtype)}
            self._load(target, alone=True)
            return target[name]

        return SavedTensor(name, kind.size, kind.properties.dtype, read)

    def read(self, wanted: Iterable[tuple[SavedTensor, Tensor]]) -> None:
        """Fill this rank's tensors, or its parts of :class:`~.slices.SlicedTensor`, with saved values; collective.

        Values are converted to the dtype of the tensor that they are read into.
        """
        rounds: list[dict[str, Tensor]] = [{}]
        for saved, target in wanted:
            free = next((r for r in rounds if saved.saved_name not in r), None)  # one tensor may be wanted twice
            if free is None:
                rounds.append(free := {})
            free[saved.saved_name] = target
        everyone: list[int] = [len(rounds)]
        if dist.is_initialized():
            everyone = [0] * dist.get_world_size()
            dist.all_gather_object(everyone, len(rounds))
        for number in range(max(everyone)):
            self._load(rounds[number] if number < len(rounds) else {})

    def _load(self, targets: dict[str, Any], alone: bool = False) -> None:
        with _torch_errors(f"Reading {self.folder}"):
            dcp.load(
                targets,
                storage_reader=_Reader(self.folder, self._metadata),
                planner=_LoadPlanner(self._weights_only),
                no_dist=alone,
            )


@contextmanager
def _torch_errors(doing: str) -> Iterator[None]:
    """torch raises what any rank raised on all of them, as an exception that is no `Exception`."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as found:
        rank, (error, _) = next(iter(found.failures.items()))
        raise CheckpointError(f"{doing} failed on rank {rank}: {type(error).__name__}: {error}") from error


class _LoadPlanner(DefaultLoadPlanner):
    """Names are taken as they stand in the index, and plain values are read safely."""

    def __init__(self, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=self._weights_only)


class _Reader(FileSystemReader):
    """Reads the tensors of an index that was read before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def read_index(folder: Path) -> Metadata:
    """Read the index, which is a pickle, without running code that it names.

    Raises:
        pickle.UnpicklingError: it names something that torch does not write there.
    """
    with open(folder / INDEX, "rb") as file:
        return _IndexUnpickler(file).load()


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
