"""Lightning's ModelCheckpoint and the Trainer's `ckpt_path`, with checkpoints of both kinds."""

import os
import re
import shutil
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from checkpoints.runs import Shuffled, flip, full_weights
from helpers.models import Lit, Recipe
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.checkpoints import storage
from lightning_zero3.strategies.checkpoints.storage import damage
from lightning_zero3.strategies.state_dicts.collective_errors import CheckpointError

RECIPE = Recipe(steps=4, optimizer="adamw")
# kind -> what is said of one that lost a part, and of the place of a changed bit
KINDS = {
    "sharded": ("incomplete: __1_0.distcp has 0 of ", "__1_0.distcp"),
    "file": ("incomplete: the end of the file is missing", r"'.*/data/\d+'"),
}


def new():
    return Lit(RECIPE, lambda module: {})


def fit(world_size, folder, saver, epochs=3, module=None, kind="file", **paths):
    options = {"enable_checkpointing": True, "limit_val_batches": 1.0, "default_root_dir": folder}
    strategy = zero3(checkpoint=CheckpointOptions(kind=kind))
    runner = trainer(strategy, world_size, max_epochs=epochs, callbacks=[saver], **options)
    runner.fit(module or new(), **paths)
    return runner


def names(folder):
    return sorted(path.name for path in Path(folder).glob("*.ckpt"))


def best(rank, world_size, folder):
    saver = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    runner = fit(world_size, folder, saver)
    kept = names(folder)
    [tested] = runner.test(ckpt_path="best", verbose=False)
    [checked] = trainer(zero3(), world_size, limit_val_batches=1.0).validate(
        new(), ckpt_path=saver.best_model_path, verbose=False
    )
    predicted = trainer(zero3(), world_size).predict(new(), ckpt_path=saver.best_model_path)
    module = new()
    again = fit(
        world_size,
        folder,
        ModelCheckpoint(folder, "{epoch}", save_last=True),
        4,
        module,
        ckpt_path="last",
    )
    scores = saver.best_model_score.item(), tested["val_loss"], checked["val_loss"]
    return kept, scores, len(predicted), len(module.losses), again.global_step


def triggers(rank, world_size, folder):
    found = {}
    fit(
        world_size,
        f"{folder}/steps",
        ModelCheckpoint(f"{folder}/steps", "{step}", every_n_train_steps=5, save_top_k=-1),
    )
    found["steps"] = names(f"{folder}/steps")
    every = ModelCheckpoint(
        f"{folder}/time", "{step}", train_time_interval=timedelta(0), save_top_k=-1
    )
    fit(world_size, f"{folder}/time", every, 1)
    found["time"] = names(f"{folder}/time")
    link = ModelCheckpoint(
        f"{folder}/link", "newest", save_last="link", enable_version_counter=False
    )
    fit(world_size, f"{folder}/link", link, 2)
    module = new()
    fit(world_size, f"{folder}/link", link, 3, module, ckpt_path="last")
    found["link"] = (
        names(f"{folder}/link"),
        Path(folder, "link", "last.ckpt").is_symlink(),
        len(module.losses),
    )
    small = ModelCheckpoint(f"{folder}/small", "{epoch}", save_weights_only=True)
    runner = fit(world_size, f"{folder}/small", small, 1)
    before = full_weights(runner)
    other = trainer(zero3(), world_size, limit_val_batches=1.0)
    other.validate(new(), ckpt_path=small.best_model_path, verbose=False)
    assert_same_tensors(full_weights(other), before)
    with pytest.raises(KeyError, match="save_weights_only"):
        fit(world_size, f"{folder}/small", small, 2, ckpt_path=small.best_model_path)
    return found, {kind: broken(world_size, f"{folder}/broken {kind}", kind) for kind in KINDS}


class Newest(ModelCheckpoint):
    CHECKPOINT_NAME_LAST = "newest"


def harm(work):
    """Do something to files once, while all ranks wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


def lose_a_part(path):
    path = Path(path)
    if path.is_dir():
        harm((path / "__1_0.distcp").unlink)
    else:
        harm(lambda: os.truncate(path, path.stat().st_size - 100))


def copy(path, to):
    (shutil.copytree if path.is_dir() else shutil.copy)(path, to)


def change(path):
    """Change a bit of a weight."""
    if path.is_dir():
        flip(path / "__1_0.distcp")
    else:
        content = torch.load(path, weights_only=True)["state_dict"]["net.embed.weight"]
        flip(path, path.read_bytes().index(content.numpy().tobytes()))


def resume(world_size, folder, path, kind):
    """The number of steps done, or the error."""
    module = new()
    try:
        fit(world_size, folder, Newest(folder, save_top_k=0), 4, module, kind, ckpt_path=path)
    except CheckpointError as error:
        return str(error)
    return len(module.losses)


def broken(world_size, folder, kind):
    saver = Newest(folder, "{epoch}", monitor="val_loss", mode="max", save_last=True)
    runner = fit(world_size, folder, saver, 2, kind=kind)
    found = {"hpc": []}
    for number in (2, 3):
        fit(
            world_size, folder, Newest(folder, save_top_k=0), number, kind=kind, ckpt_path="last"
        ).save_checkpoint(f"{folder}/hpc_ckpt_{number}.ckpt")
    found["hpc"].append(resume(world_size, folder, "hpc", kind))
    lose_a_part(f"{folder}/hpc_ckpt_3.ckpt")
    found["hpc"].append(resume(world_size, folder, "hpc", kind))
    lose_a_part(saver.best_model_path)
    with pytest.raises(CheckpointError) as error:
        runner.test(ckpt_path="best", verbose=False)
    found["best"] = str(error.value)
    lose_a_part(f"{folder}/newest.ckpt")
    found["incomplete"] = resume(world_size, folder, "last", kind)
    newest = Path(folder, "newest.ckpt")
    harm(lambda: storage.remove(newest))
    harm(lambda: copy(newest.with_name("hpc_ckpt_2.ckpt"), newest))
    harm(lambda: change(newest))
    found["damaged"] = resume(world_size, folder, "last", kind)
    return found


def test_the_callback_and_the_names_of_the_trainer(tmp_path):
    kept, scores, predicted, more, steps = run_ranks(best, 2, str(tmp_path / "best"), timeout=100)[
        0
    ]
    assert len(kept) == 3 and "last.ckpt" in kept
    assert scores[1:] == pytest.approx([scores[0]] * 2, rel=1e-6)
    assert (predicted, more, steps) == (4, 4, 16)
    (found, all_broken), (others, broken_elsewhere) = run_ranks(
        triggers, 2, str(tmp_path / "triggers"), timeout=150
    )
    assert found == others
    assert found["steps"] == ["step=10.ckpt", "step=5.ckpt"]
    assert found["time"] == [f"step={k}.ckpt" for k in range(1, 5)]
    assert found["link"] == (["last.ckpt", "newest.ckpt"], True, 4)

    for kind, (lost, part) in KINDS.items():
        folder, broken = tmp_path / "triggers" / f"broken {kind}", all_broken[kind]
        assert broken["hpc"][0] == 4
        for told, name in (
            (broken["hpc"][1], r"hpc_ckpt_3"),
            (broken["best"], r"epoch=\d"),
            (broken["incomplete"], "newest"),
        ):
            assert re.search(rf"{folder}/{name}.ckpt failed on rank 0: {re.escape(lost)}", told)
        assert re.search(
            rf"newest.ckpt failed.*: damaged: {part} does not have the checksum", broken["damaged"]
        )
        for name in broken:
            assert broken_elsewhere[kind][name] == broken[name]


class Terminate(Callback):
    """SIGTERM for one rank in the middle of a step, as a scheduler sends it."""

    def on_before_backward(self, trainer, *_):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def preempted(rank, world_size, folder):
    def run(*callbacks):
        module = Shuffled()
        saver = ModelCheckpoint(
            folder,
            "{step}",
            every_n_epochs=1,
            save_top_k=-1,
            save_on_exception=True,
            save_last=True,
        )
        options = {"enable_checkpointing": True, "use_distributed_sampler": True, "max_epochs": 2}
        runner = trainer(
            zero3(unit_policy=None), world_size, callbacks=[saver, *callbacks], **options
        )
        try:
            runner.fit(module, ckpt_path="last")
        except SIGTERMException:
            return runner.global_step, module.losses, names(folder)
        return runner.global_step, module.losses, full_weights(runner)

    stopped = run(Terminate())
    assert not any(damage(Path(folder, name)) for name in names(folder))
    resumed = run()
    whole = trainer(zero3(unit_policy=None), world_size, max_epochs=2, use_distributed_sampler=True)
    module = Shuffled()
    whole.fit(module)
    return stopped, resumed, (module.losses, full_weights(whole))


def test_sigterm_saves_and_the_next_start_goes_on(tmp_path):
    for stopped, resumed, (losses, weights) in run_ranks(
        preempted, 2, str(tmp_path / "run"), timeout=100
    ):
        assert 3 < stopped[0] < 12 and f"step={stopped[0]}.ckpt" in stopped[2]
        assert stopped[1] + resumed[1] == losses
        assert resumed[0] == 12
        assert_same_tensors(resumed[2], weights)
