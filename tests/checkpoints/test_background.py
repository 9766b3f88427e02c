"""Saves in the background: what was there when they began, while training goes on; no error is lost."""

import time
from pathlib import Path

import pytest
import torch
from checkpoints.runs import Shuffled
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.checkpoints import sharded
from lightning_zero3.strategies.checkpoints.errors import CheckpointError

STEPS, EVERY = 12, 4


class Steps(Callback):
    """When each step began, and which checkpoints there were."""

    def __init__(self, folder):
        self.folder, self.seen = Path(folder), []

    def on_train_batch_start(self, trainer, *_):
        self.seen.append((trainer.global_step, sorted(path.name for path in self.folder.glob("*.ckpt"))))


def fit(world_size, folder, background, keep=-1):
    steps = Steps(folder)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=EVERY, save_top_k=keep)
    strategy = zero3(unit_policy=None, checkpoint=CheckpointOptions(background=background))
    options = {"max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": True, "use_distributed_sampler": True}
    runner = trainer(strategy, world_size, callbacks=[saver, steps], **options)
    runner.fit(Shuffled())
    return runner, steps.seen


def slow(monkeypatch, harm=None):
    """Make the writing take as long as some steps, and perhaps fail on one rank; returns bytes of the copies."""
    written, copies = sharded._write, []

    def write(prepared, stage, rank, *rest):
        copies.append(sum(p.nbytes for s in sharded.tensors_in(prepared.state, sharded.SlicedTensor) for p in s.parts.values()))
        time.sleep(0.5)
        if harm is not None and rank == harm:
            sharded.together("Saving", lambda: Path("/nowhere/at/all").write_text(""), rest[-1])
        if harm is not None:
            sharded.together("Saving", lambda: None, rest[-1])
        written(prepared, stage, rank, *rest)

    monkeypatch.setattr(sharded, "_write", write)
    return copies


def run(rank, world_size, folder):
    fit(world_size, f"{folder}/foreground", False)
    with pytest.MonkeyPatch.context() as patch:
        copies = slow(patch)
        runner, seen = fit(world_size, f"{folder}/background", True)
        ledger = runner.strategy.memory_ledger()
        assert 0 < max(copies) <= ledger["parameters"] + ledger["optimizer_state"]
        fit(world_size, f"{folder}/one", True, keep=1)
    failed = None
    with pytest.MonkeyPatch.context() as patch:
        slow(patch, harm=1)
        with pytest.raises(CheckpointError, match="Saving failed on rank 1: FileNotFoundError") as error:
            fit(world_size, f"{folder}/failed", True)
        failed = str(error.value)
    return seen, failed


def test_background_saves(tmp_path):
    ranks = run_ranks(run, 2, str(tmp_path), timeout=100)
    seen = dict(ranks[0][0])
    assert seen[EVERY] == [], "training did not go on while the first checkpoint was written"
    names = [f"step={k}.ckpt" for k in range(EVERY, STEPS + 1, EVERY)]
    for name in names:  # slow or not, what was saved is the state at that step
        files = [tmp_path / kind / name for kind in ("foreground", "background")]
        for file in files:
            dcp_to_torch_save(file, f"{file}.pt")
        now, then = (torch.load(f"{file}.pt", weights_only=True) for file in files)
        assert_same_tensors(then["state_dict"], now["state_dict"])
        assert_same_tensors(then["optimizer_0"]["state"], now["optimizer_0"]["state"])
    assert [path.name for path in (tmp_path / "one").iterdir()] == names[-1:], "superseded ones are removed, later"
    assert ranks[0][1] == ranks[1][1]
    assert not list((tmp_path / "failed").glob("*.ckpt"))
