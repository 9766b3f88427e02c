"""Weights from other programs and for them; what they wrote and read is plain torch and the
safetensors library.
"""

import json
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from safetensors.torch import load_file, save_file

from checkpoints.runs import full_weights, no_gradients
from helpers.models import Lit, Recipe, TinyLm, make
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.__main__ import main
from lightning_zero3.strategies.state_dicts.collective_errors import CheckpointError

RECIPE = Recipe(steps=2, seed=7)
MAPPING = {r"^transformer\.": "net.", r"\.(ff_)(up|down)\.": r".\2."}


def foreign(key):
    """What another program calls a parameter of TinyLm."""
    return "transformer." + key.replace(".up.", ".ff_up.").replace(".down.", ".ff_down.")


def write_foreign(folder):
    """The same weights in every form; returns them by our names."""
    weights = make(lambda: TinyLm(), 3).state_dict()
    theirs = {foreign(key): value for key, value in weights.items()}
    half = len(theirs) // 2
    parts = [dict(list(theirs.items())[:half]), dict(list(theirs.items())[half:])]
    (folder / "two").mkdir()
    for k, part in enumerate(parts):
        save_file(part, folder / "two" / f"{k}.safetensors")
    where = {key: f"{k}.safetensors" for k, part in enumerate(parts) for key in part}
    (folder / "two" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    save_file(theirs, folder / "one.safetensors")
    torch.save(theirs, folder / "raw.pt")
    torch.save({"state_dict": theirs, "epoch": 3}, folder / "lightning.ckpt")
    dcp.save({"model": theirs}, checkpoint_id=folder / "dcp", no_dist=True)
    save_file({**theirs, "transformer.position": torch.zeros(2, 2)}, folder / "shape.safetensors")
    save_file({**parts[0], "extra": torch.zeros(1)}, folder / "half.safetensors")
    return {f"net.{key}": value for key, value in weights.items()}


SOURCES = [
    "two",
    "two/model.safetensors.index.json",
    "one.safetensors",
    "raw.pt",
    "lightning.ckpt",
    "dcp",
]


class Load(Callback):
    def __init__(self, folder):
        self.folder, self.found, self.errors = folder, {}, {}

    def on_fit_start(self, trainer, module):
        load, zeros = (
            trainer.strategy.load_weights,
            {k: torch.zeros_like(v) for k, v in full_weights(trainer).items()},
        )
        for name in SOURCES:
            with trainer.strategy.gathered(module, modify=True), torch.no_grad():
                for p in module.parameters():
                    p.zero_()
            assert_same_tensors(full_weights(trainer), zeros)
            assert load(f"{self.folder}/{name}", MAPPING) == ([], [])
            self.found[name] = full_weights(trainer)
        for name in ("shape", "half", "none"):
            with pytest.raises((RuntimeError, CheckpointError)) as error:
                load(f"{self.folder}/{name}.safetensors", MAPPING)
            self.errors[name] = str(error.value)
        self.after = full_weights(trainer)
        self.lists = load(f"{self.folder}/half.safetensors", MAPPING, strict=False)
        trainer.strategy.save_weights(
            f"{self.folder}/out", {r"^net\.": "model."}, max_file_bytes=2000
        )


def run(rank, world_size, folder):
    load = Load(folder)
    runner = trainer(zero3(), world_size, callbacks=[load])
    runner.fit(Lit(RECIPE, no_gradients))
    runner.save_checkpoint(f"{folder}/end.ckpt")
    return load.found, load.errors, load.lists, load.after, full_weights(runner)


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_from_and_for_others(world_size, tmp_path):
    expected = write_foreign(tmp_path)
    ranks = run_ranks(run, world_size, str(tmp_path), timeout=100)
    found, errors, (missing, unexpected), after, end = ranks[0]
    for name in SOURCES:
        assert_same_tensors(found[name], expected)
    assert_same_tensors(after, expected)  # what could not be loaded changed nothing
    assert all(rank[1] == errors for rank in ranks)
    assert (
        "size mismatch for net.position: the checkpoint has (2, 2), the model (5, 10)."
        in errors["shape"]
    )
    assert re.search(
        r'Missing key\(s\).*"net.head.weight".*Unexpected key\(s\).*"extra"',
        errors["half"],
        re.DOTALL,
    )
    assert "none.safetensors failed" in errors["none"]
    assert unexpected == ["extra"] and set(missing) == set(expected) - {
        f"net.{key}" for key in list(TinyLm().state_dict())[: len(expected) // 2]
    }
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == len(set(index["weight_map"].values())) > 2
    written = {key: value for file in files for key, value in load_file(file).items()}
    assert {
        key: load_file(tmp_path / "out" / file)[key].shape
        for key, file in index["weight_map"].items()
    } == {key: value.shape for key, value in written.items()}
    assert_same_tensors(
        written, {key.replace("net.", "model."): value for key, value in expected.items()}
    )
    largest = max(value.nbytes for value in written.values())
    assert all(
        sum(v.nbytes for v in load_file(file).values()) <= max(2000, largest) for file in files
    )
    assert (
        main(["consolidate", "--safetensors", str(tmp_path / "end.ckpt"), str(tmp_path / "end")])
        == 0
    )
    assert_same_tensors(load_file(tmp_path / "end" / "model.safetensors"), end)
