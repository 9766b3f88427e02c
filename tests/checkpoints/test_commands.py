"""``python -m lightning_zero3``: what the commands print and do, against what torch reads."""

import torch

from lightning_zero3.__main__ import main


def test_inspect_lists_the_tensors_of_a_full_checkpoint(tmp_path, capsys):
    file = tmp_path / "full.ckpt"
    state = {"state": {0: {"exp_avg": torch.zeros(3, 2)}}, "param_groups": [{"lr": 0.1}]}
    weights = {"net.weight": torch.ones(3, 2), "net.count": torch.tensor(4)}
    torch.save({"epoch": 2, "global_step": 17, "state_dict": weights, "optimizer_states": [state]}, file)
    assert main(["inspect", str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"{file}: full checkpoint, {file.stat().st_size:,} bytes" in printed and "epoch 2, step 17" in printed
    assert [line.split() for line in printed.splitlines()[2:]] == [
        ["state_dict.net.weight", "(3,", "2)", "float32"],
        ["state_dict.net.count", "()", "int64"],
        ["optimizer_states.0.state.0.exp_avg", "(3,", "2)", "float32"],
    ]
