"""Weights alone, for and from other programs: safetensors files with an index, any checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..state_dicts.collective_errors import CheckpointError, run_on_all_ranks
from ..state_dicts.gather import gather_slices
from ..state_dicts.slices import SavedTensor, SlicedTensor
from . import single_file
from .manifest import is_file_name
from .storage import commit, make_folder

if TYPE_CHECKING:
    from .sharded import ShardedCheckpoint

INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def open_weights(path: Path, weights_only: bool) -> tuple[dict[str, Any], ShardedCheckpoint | None]:
    """Return key -> tensor without reading values yet; collective.

    Args:
        path: a safetensors file, its index or the folder of both; a checkpoint's file or folder; a
            file of ``torch.save``.
        weights_only: see :class:`~.options.CheckpointOptions`.

    Returns:
        the tensors, and the sharded checkpoint that has them, if ``path`` is one.

    Raises:
        CheckpointError: on all ranks, if ``path`` cannot be read.
    """
    if (
        path.suffix == ".safetensors"
        or path.name.endswith(".index.json")
        or (path / INDEX).exists()
        or _single_file(path).exists()
    ):
        tensors: dict[str, Any] = {}
        run_on_all_ranks(f"Loading {path}", lambda: tensors.update(_open_safetensors(path)))
        return tensors, None
    if not path.is_dir():
        content = single_file.load(path, weights_only)
        return dict(content.get("state_dict", content)), None
    from .sharded import ShardedCheckpoint

    source = ShardedCheckpoint(path, weights_only)
    state = source.state()
    return dict(state.get("state_dict", state.get("model", state))), source


def _single_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def _open_safetensors(path: Path) -> dict[str, SavedTensor]:
    from safetensors import safe_open

    if path.is_dir():
        path = path / INDEX if (path / INDEX).exists() else _single_file(path)
    files = [path]
    if path.suffix == ".json":
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        for name in weight_map.values():
            if not is_file_name(name):
                raise CheckpointError(f"{path} names {name!r}, which is no file in its folder.")
        files = sorted({path.parent / name for name in weight_map.values()})
    tensors = {}
    for file in files:
        with safe_open(file, "pt") as stream:
            for key in stream.keys():
                part = stream.get_slice(key)
                dtype = _DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise CheckpointError(
                        f"{key!r} in {file} has the type {part.get_dtype()}, which is not"
                        " supported."
                    )
                tensors[key] = SavedTensor(
                    key, torch.Size(part.get_shape()), dtype, partial(_read_tensor, file, key)
                )
    return tensors


def _read_tensor(file: Path, key: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, "pt") as stream:
        return stream.get_tensor(key)


def rename_keys(state: Mapping[str, Any], key_mapping: Mapping[str, str] | None) -> dict[str, Any]:
    """Apply each pattern -> replacement to the keys of ``state``, in order, as ``re.sub`` does.

    Raises:
        ValueError: two keys get the same name.
    """
    result: dict[str, Any] = {}
    for key, value in state.items():
        new = key
        for pattern, replacement in (key_mapping or {}).items():
            new = re.sub(pattern, replacement, new)
        if new in result:
            raise ValueError(f"key_mapping gives {key!r} and another key the name {new!r}.")
        result[new] = value
    return result


class SafetensorsWriter:
    """Write tensors to files in the order in which they are added.

    Memory never has more than the tensors of one file.

    Args:
        folder: receives the files; exists.
        max_bytes: of a file. A larger tensor has a file of its own.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._pending: dict[str, Tensor] = {}  # tensors of the next file
        self._files: list[list[str]] = []  # names of the tensors in each file
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to CPU memory, to be written with the next file."""
        pending_bytes = sum(pending.nbytes for pending in self._pending.values())
        if self._pending and pending_bytes + tensor.nbytes > self._max_bytes:
            self._write_file()
        self._pending[name] = tensor.to("cpu", memory_format=torch.contiguous_format, copy=True)
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last file, and the index if there are several files."""
        self._write_file()
        count = len(self._files)
        names = (
            [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
            if count > 1
            else ["model.safetensors"]
        )
        for k, name in enumerate(names):
            (self._folder / f"part-{k}").rename(self._folder / name)
        if count > 1:
            weight_map = {
                tensor: name
                for name, tensors in zip(names, self._files, strict=True)
                for tensor in tensors
            }
            content = {
                "metadata": {"total_size": self._total_bytes},
                "weight_map": dict(sorted(weight_map.items())),
            }
            (self._folder / INDEX).write_text(
                json.dumps(content, indent=2) + "\n", encoding="utf-8"
            )

    def _write_file(self) -> None:
        from safetensors.torch import save_file

        save_file(
            self._pending, self._folder / f"part-{len(self._files)}", metadata={"format": "pt"}
        )
        self._files.append(list(self._pending))
        self._pending = {}


def save_weights(state: Mapping[str, Any], path: Path, max_file_bytes: int, rank: int) -> None:
    """Write a state dict as safetensors files with an index; collective.

    Args:
        state: has the same :class:`~.state_dicts.slices.SlicedTensor` on all ranks.
        path: of the folder; a folder that is there is replaced when all is written.
        max_file_bytes: the most bytes of a file.
        rank: of this process. Rank 0 writes.

    Raises:
        CheckpointError: on all ranks; what was at ``path`` is still there.
    """
    keys: dict[int, list[str]] = {}
    for key, value in state.items():
        keys.setdefault(id(value), []).append(key)
    stage = run_on_all_ranks(f"Saving {path}", lambda: make_folder(path) if rank == 0 else path)[0]
    writer = SafetensorsWriter(stage, max_file_bytes)

    def write(tensor: SlicedTensor, value: Tensor) -> None:
        for key in keys[id(tensor)]:
            writer.add(key, value)

    gather_slices(state, rank, write)

    def finish() -> None:
        for key, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, SlicedTensor):
                writer.add(key, value)
        writer.finish()
        commit(stage, path)

    run_on_all_ranks(f"Saving {path}", finish if rank == 0 else lambda: None)
