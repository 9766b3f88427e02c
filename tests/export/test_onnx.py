"""ONNX: a graph made before the first step, weights written by all ranks; run without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from export.models import MODELS, fit, tokens
from helpers.ranks import run_ranks
from lightning_zero3.__main__ import main
from lightning_zero3.callbacks import ModelExport

# ONNX's own evaluator, which is written with NumPy.
SERVE = """
import sys
import numpy as np
from onnx.reference import ReferenceEvaluator
file, x, y = sys.argv[1:]
found = ReferenceEvaluator(file).run(None, {"x": np.load(x)})[0]
assert "torch" not in sys.modules
np.save(y, found)
"""
NAMES = ["Changing", "Dynamic", "Tied", "ResNet"]


def train(rank, world_size, folder):
    from lightning_zero3 import Zero3Strategy

    for name in NAMES:
        module = MODELS[name]()
        export = ModelExport("onnx", every="end", dynamic_shapes=module.dynamic_shapes)
        fit(module, folder / name, Zero3Strategy(), world_size, [export])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("onnx")
    run_ranks(train, 2, folder, timeout=200)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_is_the_eager_model(name, trained, tmp_path):
    module = MODELS[name].load_from_checkpoint(trained / name / "it.ckpt").eval()
    x = tokens(4, 7, 3) if name == "Dynamic" else module.example_input_array
    import numpy as np

    np.save(tmp_path / "x.npy", x.numpy())
    files = [str(trained / name / "model.onnx"), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    run = subprocess.run([sys.executable, "-c", SERVE, *files], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    with torch.no_grad():
        expected = module(x)
    found = torch.from_numpy(np.load(tmp_path / "y.npy"))
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_makes_the_same_files(name, trained, tmp_path):
    folder = trained / name
    written = [(folder / file).read_bytes() for file in ("model.onnx", "model.onnx.data")]
    assert len(written[0]) < len(written[1])  # the weights are beside the graph
    skeleton = ["--skeleton", str(folder / "model.onnx.skeleton")]
    out = str(tmp_path / "model.onnx")
    assert main(["export", str(folder / "it.ckpt"), out, *skeleton]) == 0
    again = [(tmp_path / file).read_bytes() for file in ("model.onnx", "model.onnx.data")]
    assert again == written
    program = torch.export.load(folder / "model.onnx.data")
    assert set(program.state_dict) == set(torch.load(folder / "it.ckpt")["state_dict"])


def test_a_graph_is_replaced_when_the_new_one_is_complete(trained, monkeypatch, capsys):
    folder, write = trained / "Tied", Path.write_bytes
    before = (folder / "model.onnx").read_bytes()

    def half(path, content):
        write(path, content[: len(content) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", half)
    assert main(["export", str(folder / "it.ckpt"), str(folder / "model.onnx")]) == 1
    assert "model.onnx cannot be written: no space left" in capsys.readouterr().err
    assert (folder / "model.onnx").read_bytes() == before
