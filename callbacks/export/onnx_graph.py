"""ONNX: a graph whose weights lie in an archive of `torch.export` beside it."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ...strategies.checkpoints import WEIGHTS_CONFIG, begin, commit
from ...strategies.support import ArchiveReader

if TYPE_CHECKING:  # its import takes a second
    from torch.export import ExportedProgram

GRAPH = "model.onnx"  # a record, which torch does not read


def graph_of(program: ExportedProgram) -> bytes:
    """Return the graph of a program with fake weights, by torch's exporter."""
    import onnx_ir

    found: Any = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
    for value in found.model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(getattr(tensor, "raw", None), FakeTensor):
            value.const_value = onnx_ir.ExternalTensor(
                "", 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=tensor.name
            )
    return onnx_ir.to_proto(found.model).SerializeToString()


def archive_of(file: Path) -> Path:
    """Return the archive for an exported file: beside a graph, else the file itself."""
    return file.with_name(f"{file.name}.data") if file.suffix == ".onnx" else file


def write_graph(file: Path) -> None:
    """Write the graph of the archive beside ``file``, which refers to the weights there."""
    import onnx

    archive = archive_of(file)
    reader = ArchiveReader(str(archive))
    config = json.loads(reader.get_record(WEIGHTS_CONFIG))["config"]
    folder = PurePosixPath(WEIGHTS_CONFIG).parent
    model = onnx.load_model_from_string(reader.get_record(GRAPH))
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            record = f"{folder}/{config[tensor.name]['path_name']}"
            place = {"location": archive.name, "offset": str(reader.get_record_offset(record))}
            for entry in tensor.external_data:
                entry.value = place.get(entry.key, entry.value)
    stage = begin(file)
    stage.write_bytes(model.SerializeToString())
    commit(stage, file)
