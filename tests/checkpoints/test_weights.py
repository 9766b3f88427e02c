"""Weights from other programs and for them; what they wrote and read is plain torch and the
safetensors library.
"""

import itertools
import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from checkpoints.runs import full_weights, no_gradients
from helpers.kills import Died, kill_at
from helpers.models import Lit, Recipe, TinyLm, make
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.__main__ import main
from lightning_zero3.strategies.checkpoints import regions
from lightning_zero3.strategies.checkpoints.weights import (
    WeightsSave,
    open_weights,
)
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
    save_file(weights, folder / "ours.safetensors")
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
        for name in ("shape", "half", "none", "ours"):
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
    assert re.search(
        r'Missing key\(s\).*"net.head.weight".*Unexpected key\(s\).*"head.weight"',
        errors["ours"],
        re.DOTALL,
    )
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
    paths = [str(tmp_path / name) for name in ("end.ckpt", "end")]
    assert main(["consolidate", "--safetensors", "--strip-prefix", "net.", *paths]) == 0
    assert_same_tensors(
        load_file(tmp_path / "end" / "model.safetensors"),
        {key.removeprefix("net."): value for key, value in end.items()},
    )


class Early(Lit):
    """Loads weights before the model is sharded, into memory or on the meta device."""

    def __init__(self, recipe, path, hook, device):
        super().__init__(recipe, no_gradients)
        self.path, self.hook, self.lists = path, hook, None
        self.net.to(device)  # on meta, its position parameter has nothing to initialise it

    def load(self, hook):
        if hook == self.hook:
            self.lists = self.trainer.strategy.load_weights(self.path, MAPPING)

    def configure_model(self):
        self.load("configure_model")

    def setup(self, stage):
        self.load("setup")


def early(rank, world_size, folder):
    found = {}
    for hook in ("configure_model", "setup"):
        for device in ("cpu", "meta"):
            for source in ("two", "dcp", "raw.pt"):
                module = Early(replace(RECIPE, steps=0), f"{folder}/{source}", hook, device)
                runner = trainer(zero3(), world_size)
                runner.fit(module)
                found[hook, device, source] = module.lists, full_weights(runner)
    return found


def test_weights_are_loaded_before_the_model_is_sharded(tmp_path):
    expected = write_foreign(tmp_path)
    found, *_ = run_ranks(early, 2, str(tmp_path), timeout=100)
    for key, (lists, weights) in found.items():
        assert lists == ([], []), key
        assert_same_tensors(weights, expected)


class Renamed(Lit):
    """A layer gets another name after the weights were loaded, as `get_peft_model` gives them."""

    folder = ""

    def configure_model(self):
        if not hasattr(self, "late"):
            with torch.device("meta"):
                self.late = torch.nn.Sequential(torch.nn.Linear(2, 2))
            self.trainer.strategy.load_weights(f"{self.folder}/late", strict=False)
            self.late = torch.nn.Sequential(self.late)


def rename(rank, world_size, folder):
    WeightsSave(
        {"late.0.weight": torch.ones(2, 2), "late.0.bias": torch.ones(2)}, Path(folder) / "late"
    ).write()
    module = Renamed(RECIPE, no_gradients)
    module.folder = folder
    trainer(zero3(), world_size).fit(module)


def test_weights_whose_layer_is_renamed_are_missed(tmp_path):
    told = r"Weights of 'late.0.bias' \(and 1 more\) .*no such name any more.\nLoad them after"
    with pytest.raises(AssertionError, match=told):
        run_ranks(rename, 1, str(tmp_path), timeout=60)


class Tied(Callback):
    def __init__(self, folder):
        self.folder, self.errors = folder, []

    def on_fit_start(self, trainer, module):
        strategy = trainer.strategy
        self.before = full_weights(trainer)
        strategy.save_weights(f"{self.folder}/tied")
        with strategy.gathered(module, modify=True), torch.no_grad():
            for p in module.parameters():
                p.zero_()
        assert strategy.load_weights(f"{self.folder}/tied") == ([], [])
        self.after = full_weights(trainer)


def tied(rank, world_size, folder):
    callback = Tied(folder)
    trainer(zero3(), world_size, callbacks=[callback]).fit(
        Lit(Recipe(tied=True, steps=1), no_gradients)
    )
    return callback.before, callback.after


def test_tied_weights_are_written_once_and_none_is_missing(tmp_path):
    (before, after), _ = run_ranks(tied, 2, str(tmp_path), timeout=60)
    assert_same_tensors(after, before)
    written = load_file(tmp_path / "tied" / "model.safetensors")
    assert set(before) - set(written) == {"net.head.weight"} and "net.embed.weight" in written
    with safe_open(tmp_path / "tied" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def mixed(rank, world_size, folder):
    """A state of many dtypes, in which the ranks have parts of two."""
    state = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "double": torch.rand(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        "scalar": torch.tensor(2.5),
        "bool": torch.tensor([True, False, True]),
        "half": torch.ones(5, dtype=torch.bfloat16),
        "across": torch.arange(6.0).view(2, 3).t(),
        "none": torch.empty(0, 4),
        "complex": torch.view_as_complex(torch.rand(3, 2)),
    }
    WeightsSave(state, Path(folder)).write()
    return state


def test_dtypes_are_aligned_and_what_safetensors_lack_is_named(tmp_path):
    (state,) = run_ranks(mixed, 1, str(tmp_path / "mixed"))
    assert_same_tensors(load_file(tmp_path / "mixed" / "model.safetensors"), state)
    with pytest.raises(CheckpointError, match="torch.complex128"):
        WeightsSave({"x": torch.ones(2, dtype=torch.complex128)}, tmp_path / "complex")
    assert not list((tmp_path / "complex").iterdir())


def save_again(rank, world_size, folder):
    """Into a folder that has a tokenizer, a link, a checkpoint below, and older weights in two files."""
    folder = Path(folder)
    WeightsSave({"a": torch.ones(4), "b": torch.ones(4)}, folder, max_file_bytes=16).write()
    (folder / "tokenizer.json").write_text("{}")
    (folder / "link").symlink_to("tokenizer.json")
    (folder / "below").mkdir()
    (folder / "below" / "model.safetensors").write_text("another's")
    inode = folder.stat().st_ino
    WeightsSave({"a": torch.zeros(4)}, folder).write()
    # it may be a mount point, which can have no other name
    assert folder.stat().st_ino == inode


def test_other_files_of_the_folder_stay(tmp_path):
    folder = tmp_path / "out"
    run_ranks(save_again, 1, str(folder))
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == [
        "below",
        "below/model.safetensors",
        "link",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert_same_tensors(load_file(folder / "model.safetensors"), {"a": torch.zeros(4)})
    assert (folder / "link").is_symlink() and (folder / "link").read_text() == "{}"
    with pytest.raises(CheckpointError, match=r"model.safetensors is a file.\nWrite the weights"):
        WeightsSave({"a": torch.ones(4)}, folder / "model.safetensors")


@pytest.mark.parametrize("before, after", list(itertools.product((1, 2, 3), repeat=2)))
def test_killed_at_any_moment_old_and_new_weights_are_not_mixed(before, after, tmp_path):
    """Numbers of files: of one all is there; without an index several are not loaded."""

    def save(folder, value, files):
        state = {name: torch.full((4,), value) for name in "abcdef"}
        WeightsSave(state, folder, max_file_bytes=6 // files * 16).write()

    for number in range(1, 100):
        folder = tmp_path / str(number)
        save(folder, 1.0, before)
        assert len(list(folder.glob("*.safetensors"))) == before
        with pytest.MonkeyPatch.context() as patch:
            calls = kill_at(patch, number)
            with suppress(Died):
                save(folder, 2.0, after)
        try:
            state = open_weights(folder, weights_only=True)
        except CheckpointError:
            assert before > 1 or after > 1
        else:
            assert set(state) == set("abcdef")
            assert len({value for tensor in state.values() for value in tensor.tolist()}) == 1
        save(folder, 3.0, after)  # and the next one is not disturbed
        assert open_weights(folder, weights_only=True)["f"][0] == 3
        written = {file.name for file in folder.iterdir() if file.is_file()}
        written -= {"model.safetensors.index.json"}
        assert len(written) == after and all(name.endswith("safetensors") for name in written)
        left = [path for path in folder.iterdir() if path.is_dir()]
        assert not any(list(path.iterdir()) for path in left)  # an empty folder, of two calls
        if len(calls) < number:
            break
    assert 4 < number < 99, "the last round was not killed"


def test_of_two_jobs_that_write_weights_the_one_that_began_last_has_its_own(tmp_path):
    first = WeightsSave({"a": torch.zeros(3)}, tmp_path)
    WeightsSave({"a": torch.ones(3)}, tmp_path).write()
    with pytest.raises(CheckpointError, match=f"Saving {tmp_path} failed"):
        first.write()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], torch.ones(3))


def share(rank, world_size, folder):
    sizes, write = [], regions.write_regions

    def write_regions(stage, mine):
        pieces = write(stage, mine)
        sizes.append(sum(piece.size for piece in pieces))
        return pieces

    runner = trainer(zero3(), world_size)
    runner.fit(Lit(RECIPE, no_gradients))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "write_regions", write_regions)
        runner.strategy.save_weights(folder)
    return sizes, full_weights(runner)


def test_every_rank_writes_its_share_of_the_weights(tmp_path):
    ranks = run_ranks(share, 3, str(tmp_path / "out"), timeout=60)
    weights = ranks[0][1]
    written = [sum(sizes) for sizes, _ in ranks]
    assert sum(written) == sum(value.nbytes for value in weights.values())
    assert min(written) > sum(written) / 4
    assert_same_tensors(load_file(tmp_path / "out" / "model.safetensors"), weights)
