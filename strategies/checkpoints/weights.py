"""Weights alone, from other programs and for them: any checkpoint, and Hugging Face's safetensors
with their index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..state_dicts.collective_errors import CheckpointError, together
from ..state_dicts.gather import gather
from ..state_dicts.slices import SavedTensor, SlicedTensor
from . import full
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
    """Key -> tensor, of which nothing is read yet; collective.

    Args:
        path: a safetensors file, its index or the folder of both; a checkpoint's file or folder; a
            file of ``torch.save``.
        weights_only: see :class:`~.options.CheckpointOptions`.

    Returns:
        the tensors, and the sharded checkpoint that they are in, if it is one.

    Raises:
        CheckpointError: on all ranks, if it cannot be read.
    """
    if (
        path.suffix == ".safetensors"
        or path.name.endswith(".index.json")
        or (path / INDEX).exists()
        or _single(path).exists()
    ):
        found: dict[str, Any] = {}
        together(f"Loading {path}", lambda: found.update(_open_safetensors(path)))
        return found, None
    if not path.is_dir():
        content = full.load(path, weights_only)
        return dict(content.get("state_dict", content)), None
    from .sharded import ShardedCheckpoint

    source = ShardedCheckpoint(path, weights_only)
    state = source.state()
    return dict(state.get("state_dict", state.get("model", state))), source


def _single(folder: Path) -> Path:
    return folder / "model.safetensors"


def _open_safetensors(path: Path) -> dict[str, SavedTensor]:
    from safetensors import safe_open

    if path.is_dir():
        path = path / INDEX if (path / INDEX).exists() else _single(path)
    files = [path]
    if path.suffix == ".json":
        files = sorted(
            {
                path.parent / name
                for name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
            }
        )
    found = {}
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
                found[key] = SavedTensor(
                    key, torch.Size(part.get_shape()), dtype, partial(_read, file, key)
                )
    return found


def _read(file: Path, key: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, "pt") as stream:
        return stream.get_tensor(key)


def renamed(state: Mapping[str, Any], key_mapping: Mapping[str, str] | None) -> dict[str, Any]:
    """``state`` with each regular expression in its keys replaced, in order, as ``re.sub`` does it.

    Raises:
        ValueError: two keys become one.
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
    """Writes tensors as they come; holds no more than one file of them.

    Args:
        folder: to write to; exists.
        max_bytes: of a file. A larger tensor has a file of its own.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._held: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; a copy of it is written."""
        if (
            self._held
            and sum(held.nbytes for held in self._held.values()) + tensor.nbytes > self._max_bytes
        ):
            self._write()
        self._held[name] = tensor.to("cpu", memory_format=torch.contiguous_format, copy=True)
        self._total += tensor.nbytes

    def finish(self) -> None:
        """Write what is held, and the index if there are several files."""
        self._write()
        count = len(self._files)
        names = (
            [f"model-{k + 1:05}-of-{count:05}.safetensors" for k in range(count)]
            if count > 1
            else ["model.safetensors"]
        )
        for k, name in enumerate(names):
            (self._folder / f"part-{k}").rename(self._folder / name)
        if count > 1:
            where = {
                tensor: name
                for name, tensors in zip(names, self._files, strict=True)
                for tensor in tensors
            }
            content = {
                "metadata": {"total_size": self._total},
                "weight_map": dict(sorted(where.items())),
            }
            (self._folder / INDEX).write_text(
                json.dumps(content, indent=2) + "\n", encoding="utf-8"
            )

    def _write(self) -> None:
        from safetensors.torch import save_file

        save_file(self._held, self._folder / f"part-{len(self._files)}", metadata={"format": "pt"})
        self._files.append(list(self._held))
        self._held = {}


def save_weights(state: Mapping[str, Any], path: Path, max_file_bytes: int, rank: int) -> None:
    """Write a state dict as safetensors files with an index; collective.

    Args:
        state: with the same :class:`~.slices.SlicedTensor` on all ranks.
        path: of the folder; what is there is replaced when all is written.
        max_file_bytes: of a file.
        rank: this one. Rank 0 writes.

    Raises:
        CheckpointError: on all ranks; what was at ``path`` is still there.
    """
    keys: dict[int, list[str]] = {}
    for key, value in state.items():
        keys.setdefault(id(value), []).append(key)
    made = together(f"Saving {path}", lambda: make_folder(path) if rank == 0 else None)
    writer = SafetensorsWriter(made[0], max_file_bytes)
    gather(state, rank, lambda tensor, whole: [writer.add(key, whole) for key in keys[id(tensor)]])

    def finish() -> None:
        for key, value in state.items():
            if isinstance(value, Tensor) and not isinstance(value, SlicedTensor):
                writer.add(key, value)
        writer.finish()
        commit(made[0], path)

    together(f"Saving {path}", finish if rank == 0 else lambda: None)
