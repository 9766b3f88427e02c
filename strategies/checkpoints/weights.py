"""Weights alone, for and from other programs: safetensors files with an index, any checkpoint."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ..state_dicts.collective_errors import CheckpointError, run_on_all_ranks
from ..state_dicts.slices import TensorDescription
from . import single_file
from .manifest import is_file_name, require_file
from .regions import ParallelSave, Place, allocate
from .storage import discard, make_folder, require_stage, sync
from .zip_file import Piece

INDEX, _ONE_FILE = "model.safetensors.index.json", "model.safetensors"
_SUFFIXES = (".safetensors", ".safetensors.index.json")
MAX_FILE_BYTES = 5 * 10**9
_OWN_FILES = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


def open_checkpoint(path: Path, weights_only: bool = True) -> dict[str, Any]:
    """Return a checkpoint whose tensors are read when they are used; collective.

    Raises:
        CheckpointError: on all ranks, if it is broken.
    """
    if not path.is_dir():
        return single_file.load(path, weights_only)
    from .sharded import ShardedCheckpoint  # importing torch.distributed.checkpoint is slow

    return ShardedCheckpoint(path, weights_only).checkpoint()


def open_weights(path: Path, weights_only: bool) -> dict[str, Any]:
    """Return key -> tensor without reading values yet; collective.

    Args:
        path: a safetensors file, its index or the folder of both; a checkpoint's file or folder; a
            file of ``torch.save``.
        weights_only: see :class:`~.options.CheckpointOptions`.

    Raises:
        CheckpointError: on all ranks, if ``path`` cannot be read.
    """
    places = path / INDEX, path / _ONE_FILE, path
    file = next((f for f in places if f.name.endswith(_SUFFIXES) and f.exists()), None)
    if file is not None:
        tensors: dict[str, Any] = {}
        run_on_all_ranks(f"Loading {path}", lambda: tensors.update(_open_safetensors(file)))
        return tensors
    if not path.is_dir():
        content = single_file.load(path, weights_only)
        return dict(content.get("state_dict", content))
    from .sharded import ShardedCheckpoint

    state = ShardedCheckpoint(path, weights_only).state
    return dict(state.get("state_dict", state.get("model", state)))


def _open_safetensors(path: Path) -> dict[str, Tensor]:
    """Return tensors that are mapped, and read when they are used."""
    from safetensors import safe_open

    files = [path]
    if path.suffix == ".json":
        weight_map = json.loads(require_file(path).read_text(encoding="utf-8"))["weight_map"]
        for name in weight_map.values():
            if not is_file_name(name):
                raise CheckpointError(f"{path} names {name!r}, which is no file in its folder.")
        files = sorted({path.parent / name for name in weight_map.values()})
    tensors = {}
    for file in files:
        with safe_open(require_file(file), "pt") as stream:
            tensors.update({key: stream.get_tensor(key) for key in stream.keys()})
    return tensors


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


class WeightsSave(ParallelSave):
    """Write a state dict as safetensors files with an index, as Hugging Face does.

    Of tied weights the first is written.

    Args:
        state: has the same slices on all ranks; what is no tensor is left out.
        path: of the folder. Other files in it stay. Older weights are replaced when the new ones
            are complete, the index last; without it, after a kill, several files are not loaded.
        replica: see :class:`~.regions.ParallelSave`.
        max_file_bytes: the most bytes of a file. A larger tensor has a file of its own.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        path: Path,
        replica: tuple[int, int] = (0, 1),
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._max_file_bytes = max_file_bytes
        super().__init__(state, path, replica)

    @override
    def begin(self) -> Path:
        if self.path.is_file():
            raise CheckpointError(f"{self.path} is a file.\nWrite the weights to a folder.")
        # inside of it: the folder may be a mount point, or the only one that this user may write to
        return make_folder(self.path / INDEX)

    @override
    def reserve(self, tree: Any, stage: Path) -> Iterable[tuple[Tensor, Place]]:
        first: dict[Any, tuple[str, Tensor]] = {}  # of tied tensors
        for key, value in tree.items():
            if isinstance(value, Tensor):
                first.setdefault(_identity(value), (key, value))
        places: list[tuple[Tensor, Place]] = []
        weight_map: dict[str, str] = {}
        files = self._divide(first.values())
        for number, tensors in enumerate(files, 1):
            name = f"model-{number:05}-of-{len(files):05}" if len(files) > 1 else "model"
            name += ".safetensors"
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            end = 0
            # largest elements first: each tensor is aligned to its elements
            for key in sorted(tensors, key=lambda key: -tensors[key].element_size()):
                value = tensors[key]
                begin, end = end, end + value.nbytes
                header[key] = {
                    "dtype": _name_of(value.dtype),
                    "shape": list(value.size()),
                    "data_offsets": [begin, end],
                }
            packed = json.dumps(header).encode()
            packed += b" " * (-len(packed) % 8)
            with open(stage / name, "xb") as file:
                file.write(len(packed).to_bytes(8, "little") + packed)
                base = file.tell()
                allocate(file, base + end)
            for key, value in tensors.items():
                places.append((value, Place(name, base + header[key]["data_offsets"][0])))
            weight_map |= dict.fromkeys(tensors, name)
        if len(files) > 1:
            total = sum(tensor.nbytes for tensor, _ in places)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (stage / INDEX).write_text(text, encoding="utf-8")
            sync(stage / INDEX)
        return places

    def _divide(self, tensors: Iterable[tuple[str, Tensor]]) -> list[dict[str, Tensor]]:
        files: list[dict[str, Tensor]] = []
        size = self._max_file_bytes
        for key, value in tensors:
            size += value.nbytes
            if size > self._max_file_bytes or not files:
                files.append({})
                size = value.nbytes
            files[-1][key] = value
        return files

    @override
    def complete(self, stage: Path, pieces: list[Piece]) -> None:
        require_stage(stage, self.path)
        names = {file.name for file in stage.iterdir()}
        # hazard: whoever reads meanwhile, or after a kill, must not find an index of older files
        (self.path / INDEX).unlink(missing_ok=True)
        sync(self.path)
        for name in names - {INDEX}:
            os.replace(stage / name, self.path / name)
        for file in self.path.iterdir():
            if _OWN_FILES.fullmatch(file.name) and file.name not in names:
                file.unlink()
        sync(self.path)
        if INDEX in names:
            os.replace(stage / INDEX, self.path / INDEX)
            sync(self.path)
        discard(stage)


def _identity(tensor: Tensor) -> Any:
    """Return what tied tensors have in common."""
    if isinstance(tensor, TensorDescription) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride(), tensor.device


def _name_of(dtype: torch.dtype) -> str:
    from safetensors.torch import save

    data = save({"x": torch.empty(0, dtype=dtype)})
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["x"]["dtype"]
