"""Read directories in the format of torch.distributed.checkpoint with any number of ranks.

:mod:`.writer` writes them.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.utils import _ReaderView

from ..data import own_entries
from ..state_dicts.collective_errors import (
    CheckpointError,
    rank_and_world_size,
    run_on_all_ranks,
    without_other_ranks,
)
from ..state_dicts.slices import SavedTensor
from ..support import profile_range
from . import single_file
from .index import read_index
from .manifest import INDEX, changed, damage, require_file, sizes_of
from .writer import OTHERS, TRAINER_STATE, put_back
from .zip_file import read_records


class ShardedCheckpoint:
    """A checkpoint's directory, open for reading; opening it is collective.

    Args:
        folder: the directory.
        weights_only: refuse everything but tensors and plain values.

    Attributes:
        state: nested, as it was saved. Each tensor that has dimensions is a :class:`SavedTensor`.

    Raises:
        CheckpointError: on all ranks, if a file is missing or is not as it was written.
    """

    def __init__(self, folder: Path, weights_only: bool = True) -> None:
        self.folder, self._weights_only = folder, weights_only
        run_on_all_ranks(f"Loading {folder}", self._open)

    def _open(self) -> None:
        if not (self.folder / INDEX).is_file():
            raise CheckpointError(
                f"it has no {INDEX} and is no checkpoint in torch's distributed format. If one of"
                " its files is meant, name that"
            )
        rank, world_size = rank_and_world_size()
        # each rank compares the checksums of its share of the files
        fault = damage(self.folder) or changed(self.folder, rank, world_size)
        if fault:
            raise CheckpointError(fault)
        self._reader = _Reader(self.folder)
        self._metadata = (
            read_index(self.folder) if self._weights_only else self._reader.read_metadata()
        )
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._require_files()
        self.state = self._read_state()

    def _require_files(self) -> None:
        """Raise a CheckpointError if a file is a link, or shorter than the index says.

        Directories of other programs have no manifest, which would say so.
        """
        sizes = sizes_of(self.folder)
        for entry in self._metadata.storage_data.values():
            name, end = entry.relative_path, entry.offset + entry.length
            size = sizes.get(name, 0)
            if size < end:
                raise CheckpointError(
                    f"incomplete: {name} has {size:,} of {end:,} bytes, or is a link"
                )

    def checkpoint(self) -> dict[str, Any]:
        """Return the checkpoint as Lightning made it, with unread tensors; collective."""
        state = dict(self.state)
        rest: dict[str, Any] = {}
        run_on_all_ranks(f"Loading {self.folder}", lambda: rest.update(self._trainer_state()))
        # "model": of Lightning's `FSDPStrategy`; no key: weights alone, of `dcp.save(state_dict)`
        key = next((key for key in ("state_dict", "model") if key in state), None)
        weights, state = (state, {}) if key is None else (state.pop(key), state)
        own = own_entries(rest)
        checkpoint = {
            **put_back(rest, state.pop(OTHERS, {})),
            "state_dict": {**weights, **own.get("extra_states", {})},
        }
        if state:
            checkpoint["optimizer_states"] = [
                state[f"optimizer_{index}"]
                for index in range(len(state))
                if f"optimizer_{index}" in state
            ]
            groups = own.get("param_groups", [])
            for optimizer, saved in zip(checkpoint["optimizer_states"], groups, strict=False):
                optimizer["param_groups"] = saved
        return checkpoint

    def _trainer_state(self) -> dict[str, Any]:
        file = require_file(self.folder / TRAINER_STATE)
        if not file.exists():  # of another program: a manifest would have it
            return {}
        return single_file.read(file, self._weights_only, is_mapped=False)

    def _read_state(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, kind in self._metadata.state_dict_metadata.items():
            if not isinstance(kind, TensorStorageMetadata):
                values[name] = None
            elif not kind.size:
                values[name] = torch.empty((), dtype=kind.properties.dtype)
        self._read(values)
        nested: dict[str, Any] = {}
        for name, kind in self._metadata.state_dict_metadata.items():
            value = values[name] if name in values else self._tensor(name, kind)
            set_element(nested, (self._metadata.planner_data or {}).get(name, (name,)), value)
        return nested

    def _tensor(self, name: str, kind: Any) -> SavedTensor:
        def read_into(target: Tensor) -> None:
            self._read({name: target})

        return SavedTensor(name, kind.size, kind.properties.dtype, "cpu", read_into=read_into)

    @without_other_ranks()  # for the error, which names the folder
    def _read(self, targets: dict[str, Any]) -> None:
        """Read values into tensors of their names, or into this rank's parts of slices; local.

        They are converted to the dtype of the tensor. What has no tensor is put into ``targets``.
        """
        planner = _LoadPlanner(self._weights_only)
        planner.set_up_planner(targets, self._metadata)

        def read() -> None:
            self._reader.read_data(planner.create_local_plan(), planner)

        with profile_range("read checkpoint"):
            run_on_all_ranks(f"Reading {self.folder}", read)


class _LoadPlanner(DefaultLoadPlanner):
    """Use names as they stand in the index, and read plain values under ``weights_only``.

    ``DefaultLoadPlanner`` flattens the targets by default, and its ``load_bytes`` runs
    ``torch.load`` with ``weights_only=False``.
    """

    def __init__(self, weights_only: bool) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=self._weights_only
        )


class _Reader(FileSystemReader):
    """Look into each record before it is read."""

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        part: Any = _Part(cast(Any, file), sinfo.offset, sinfo.length)
        read_records(part)  # raises if one is larger than the place it takes
        part.seek(0)
        return part


class _Part(_ReaderView):
    """A part of a file, where the end is found too: torch's view counts from it forwards."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        if whence == os.SEEK_END:
            offset, whence = max(self.len + offset, 0), os.SEEK_SET
        return super().seek(offset, whence)
