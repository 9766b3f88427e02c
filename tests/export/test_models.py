"""What is exported of ten models that two ranks have trained, served without the package."""

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from export.models import MODELS, fit, tokens
from helpers.ranks import run_ranks
from lightning_zero3.__main__ import main
from lightning_zero3.callbacks import ModelExport

# Loads every program of a folder and writes its outputs; knows torch alone.
SERVE = """
import sys, torch
class Nothing:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in ("lightning", "lightning_zero3", "peft"), name
sys.meta_path.insert(0, Nothing())
inputs = torch.load(sys.argv[1], weights_only=True)
outputs = {}
for file, batches in inputs.items():
    program = torch.export.load(file).module()
    with torch.no_grad():
        outputs[file] = [program(*args, **kwargs) for args, kwargs in batches]
torch.save(outputs, sys.argv[2])
"""


def train_all(rank, world_size, folder, names):
    from lightning_zero3 import Zero3Strategy

    for name in names:
        module = MODELS[name]()
        export = ModelExport(every="end", dynamic_shapes=module.dynamic_shapes)
        fit(module, folder / name, Zero3Strategy(), world_size, [export])


def batches_of(name, module):
    example = module.example_input_array
    batches = [((), example)] if isinstance(example, dict) else [((example,), {})]
    if name == "Dynamic":
        batches += [((tokens(2, 7, 3),), {}), ((tokens(3, 2, 11),), {})]
    return batches


# The second group takes longer: `transformers` is imported on each rank.
GROUPS = {
    "own": ["ResNet", "Lstm", "Dynamic", "Tied", "Changing"],
    "others": ["Gpt", "Llama", "Bert", "Vit", "Lora"],
}
CASES = [(group, name) for group, names in GROUPS.items() for name in names]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Makes a folder for each model of a group: "model.pt2", its skeleton, and "it.ckpt"."""

    @cache
    def train(group):
        folder = tmp_path_factory.mktemp(group)
        run_ranks(train_all, 2, folder, GROUPS[group], timeout=240)
        return folder

    return train


@pytest.fixture(scope="module")
def served(trained):
    """Serves the programs of a group in a process of their own: name -> outputs."""

    @cache
    def serve(group):
        folder = trained(group)
        batches = {n: batches_of(n, MODELS[n]()) for n in GROUPS[group]}
        inputs = {str(folder / n / "model.pt2"): batches[n] for n in batches}
        torch.save(inputs, folder / "inputs")
        command = [sys.executable, "-c", SERVE, str(folder / "inputs"), str(folder / "outputs")]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        outputs = torch.load(folder / "outputs", weights_only=True)
        return {Path(file).parent.name: values for file, values in outputs.items()}

    return serve


def test_all_are_tried():
    assert {name for _, name in CASES} == set(MODELS)


@pytest.mark.parametrize("group, name", CASES)
def test_a_program_is_the_eager_model(group, name, trained, served):
    module = MODELS[name].load_from_checkpoint(trained(group) / name / "it.ckpt").eval()
    module.to(memory_format=torch.contiguous_format)  # as weights lie in a program
    for (args, kwargs), found in zip(batches_of(name, module), served(group)[name], strict=True):
        with torch.no_grad():
            expected = module(*args, **kwargs)
        if name == "Bert":
            assert list(expected) == list(found) == ["logits"]
            expected, found = expected["logits"], found["logits"]
        assert expected.abs().max() > 0.01 and torch.equal(found, expected), name


@pytest.mark.parametrize("group, name", CASES)
def test_the_command_makes_the_same_file(group, name, trained, tmp_path):
    out = tmp_path / "out.pt2"
    folder = trained(group) / name
    assert main(["export", str(folder / "it.ckpt"), str(out)]) == 0
    assert out.read_bytes() == (folder / "model.pt2").read_bytes()
