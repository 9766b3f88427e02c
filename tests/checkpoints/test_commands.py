"""``python -m lightning_zero3``: what the commands print and do, against what torch reads."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from checkpoints.runs import Whole, flip, train
from helpers.models import Recipe
from helpers.parity import assert_same_tensors, relative, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.__main__ import main


def test_inspect_lists_the_tensors_of_a_full_checkpoint(tmp_path, capsys):
    file = tmp_path / "full.ckpt"
    state = {"state": {0: {"exp_avg": torch.zeros(3, 2)}}, "param_groups": [{"lr": 0.1}]}
    weights = {"net.weight": torch.ones(3, 2), "net.count": torch.tensor(4)}
    torch.save(
        {"epoch": 2, "global_step": 17, "state_dict": weights, "optimizer_states": [state]}, file
    )
    assert main(["inspect", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"{file}: complete\nsingle file, {file.stat().st_size:,} bytes\nepoch 2, step 17\n"
    )
    assert [line.split() for line in printed.splitlines()[3:]] == [
        ["state_dict.net.weight", "(3,", "2)", "float32"],
        ["state_dict.net.count", "()", "int64"],
        ["optimizer_states.0.state.0.exp_avg", "(3,", "2)", "float32"],
    ]
    flip(file, file.read_bytes().index(torch.ones(6).numpy().tobytes()))
    assert main(["inspect", str(file)]) == 1
    assert f"{file}: damaged: 'full/data/0' does not have the checksum" in capsys.readouterr().out


def test_a_path_that_is_none_is_one_line(tmp_path, capsys):
    missing = str(tmp_path / "missing.ckpt")
    for command in (["inspect", missing], ["consolidate", missing, str(tmp_path / "one.ckpt")]):
        assert main(command) == 1
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and missing in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"print(1)\n", b"hello", pickle.dumps(print, 2)])
def test_a_file_that_is_no_checkpoint_is_one_line(tmp_path, capsys, content):
    file = tmp_path / "train.py"
    file.write_bytes(content)
    for command in (["inspect", str(file)], ["consolidate", str(file), str(tmp_path / "one.ckpt")]):
        assert main(command) == 1
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1 and len(said.err) < 500
        assert f"{file} is no checkpoint of tensors" in said.err


def test_what_holds_no_run_says_so(tmp_path, capsys):
    torch.save({"a": torch.ones(2)}, tmp_path / "weights.pt")
    assert main(["inspect", str(tmp_path / "weights.pt")]) == 0
    told = "weights alone: no run goes on from it\n  a  (2,)  float32\n"
    assert capsys.readouterr().out.endswith(told)
    torch.save([1, 2], tmp_path / "list.ckpt")
    assert main(["inspect", str(tmp_path / "list.ckpt")]) == 1
    assert capsys.readouterr().err == f"{tmp_path}/list.ckpt is no checkpoint: it holds a list.\n"


def test_files_of_other_programs_become_safetensors(tmp_path, capsys):
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(3)}
    torch.save(weights, tmp_path / "raw.pt")
    dcp.save(dict(weights), checkpoint_id=tmp_path / "plain", no_dist=True)
    adam = {
        "state": {"a": {"exp_avg": torch.ones(2, 3)}},
        "param_groups": [{"lr": 0.1, "params": ["a"]}],
    }
    of_fsdp = {"model": dict(weights), "optimizer_0": adam}
    dcp.save(of_fsdp, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    torch.save({"epoch": 2, "global_step": 7}, tmp_path / "fsdp" / "meta.pt")
    for name in ("raw.pt", "plain", "fsdp"):
        paths = [str(tmp_path / name), str(tmp_path / "out" / name)]
        assert main(["consolidate", "--safetensors", *paths]) == 0, capsys.readouterr().err
        assert_same_tensors(load_file(tmp_path / "out" / name / "model.safetensors"), weights)
    for name, optimizers in (("plain", []), ("fsdp", [adam])):
        paths = [str(tmp_path / name), str(tmp_path / f"{name}.ckpt")]
        assert main(["consolidate", *paths]) == 0, capsys.readouterr().err
        read = torch.load(paths[1], weights_only=True)
        assert_same_tensors(read["state_dict"], weights)
        found = [state["state"][0] for state in read.get("optimizer_states", [])]
        assert [s["exp_avg"].tolist() for s in found] == [
            s["state"]["a"]["exp_avg"].tolist() for s in optimizers
        ]


def test_what_is_there_is_not_replaced(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "run" / "last.ckpt")
    before = (tmp_path / "run" / "last.ckpt").read_bytes()
    paths = [str(tmp_path / "run" / "last.ckpt"), str(tmp_path / "run")]
    assert main(["consolidate", *paths]) == 1
    assert f"{tmp_path}/run is a folder with other files" in capsys.readouterr().err
    assert main(["consolidate", "--safetensors", *paths]) == 0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "last.ckpt",
        "model.safetensors",
    ]
    assert (tmp_path / "run" / "last.ckpt").read_bytes() == before


@pytest.mark.parametrize("arguments", [["x.ckpt", "s3://bucket/x"], ["s3://bucket/x", "x.ckpt"]])
def test_a_url_is_told(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["consolidate", *arguments])
    assert "invalid local value: 's3://bucket/x'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_weights_that_claim_more_than_the_file_has(tmp_path, capsys):
    torch.save({"state_dict": {"a": torch.zeros(1).expand(50_000_000)}}, tmp_path / "x.ckpt")
    paths = [str(tmp_path / "x.ckpt"), str(tmp_path / "out")]
    assert main(["consolidate", "--safetensors", *paths]) == 1
    assert "a of 200,000,000 bytes repeats itself" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error(tmp_path, monkeypatch, capsys):
    file = tmp_path / "full.ckpt"
    torch.save({"epoch": 1, "global_step": 2, "state_dict": {"a": torch.ones(1)}}, file)

    class Closed:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

        flush = write

    monkeypatch.setattr("sys.stdout", Closed())
    assert main(["inspect", str(file)]) == 1
    assert capsys.readouterr().err == ""


def test_usage_is_what_one_types(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "usage: python -m lightning_zero3 " in capsys.readouterr().out


def save_sharded(rank, world_size, folder):
    return train(
        world_size,
        Whole(Recipe(tied=True, optimizer="adamw", steps=3)),
        1,
        write=f"{folder}/it.ckpt",
        strategy=zero3(checkpoint=CheckpointOptions(kind="sharded")),
    )


def on_one_device(rank, world_size, folder):
    """Go on, on one device and without zero3, from what `consolidate` wrote."""
    module = Whole(Recipe(tied=True, optimizer="adamw", steps=3))
    runner = trainer("auto", 1, max_epochs=2)
    runner.fit(module, ckpt_path=f"{folder}/one.ckpt")
    whole = Whole(Recipe(tied=True, optimizer="adamw", steps=3))
    trainer("auto", 1, max_epochs=2).fit(whole)
    return module.losses, whole.losses


def test_a_sharded_checkpoint_becomes_one_file(tmp_path, capsys):
    saved = run_ranks(save_sharded, 3, str(tmp_path), timeout=60)[0]
    source, one = tmp_path / "it.ckpt", tmp_path / "one.ckpt"
    assert main(["consolidate", str(source), str(one)]) == 0
    assert capsys.readouterr().out.endswith(f"{one}: {one.stat().st_size:,} bytes\n")
    read = torch.load(one, weights_only=True)
    assert_same_tensors(read["state_dict"], saved.weights)
    assert (read["epoch"], read["global_step"]) == (1, 3)
    [(resumed, whole)] = run_ranks(on_one_device, 1, str(tmp_path), timeout=60)
    assert relative(resumed, whole[3:]) <= 2e-6

    assert main(["inspect", str(source)]) == 0
    printed = capsys.readouterr().out
    assert f"{source}: complete\nepoch 1, step 3, written by 3 ranks on " in printed
    assert "  state_dict.net.embed.weight  (13, 10)  float32\n" in printed
    assert "  optimizer_0.state.across.exp_avg_sq  (13, 7)  float32\n" in printed
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "it.ckpt: complete\none.ckpt: complete\n"
    size = (source / "__2_0.distcp").stat().st_size
    (source / "__2_0.distcp").unlink()
    assert main(["inspect", str(source)]) == 1
    lost = f"incomplete: __2_0.distcp has 0 of {size:,} bytes, or is a link"
    assert capsys.readouterr().out == f"{source}: {lost}\n"
    assert main(["inspect", str(tmp_path)]) == 0
    assert f"it.ckpt: {lost}\n" in capsys.readouterr().out
