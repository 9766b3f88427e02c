"""Lightning's ModelCheckpoint and the Trainer's `ckpt_path`, with sharded checkpoints."""

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from checkpoints.runs import Shuffled, full_weights
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from helpers.models import Lit, Recipe
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.checkpoints.manifest import damage

RECIPE = Recipe(steps=4, optimizer="adamw")


def new():
    return Lit(RECIPE, lambda module: {})


def fit(world_size, folder, saver, epochs=3, module=None, **paths):
    options = {"enable_checkpointing": True, "limit_val_batches": 1.0, "default_root_dir": folder}
    runner = trainer(zero3(), world_size, max_epochs=epochs, callbacks=[saver], **options)
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
    again = fit(world_size, folder, ModelCheckpoint(folder, "{epoch}", save_last=True), 4, module, ckpt_path="last")
    scores = saver.best_model_score.item(), tested["val_loss"], checked["val_loss"]
    return kept, scores, len(predicted), len(module.losses), again.global_step


def triggers(rank, world_size, folder):
    found = {}
    fit(world_size, f"{folder}/steps", ModelCheckpoint(f"{folder}/steps", "{step}", every_n_train_steps=5, save_top_k=-1))
    found["steps"] = names(f"{folder}/steps")
    every = ModelCheckpoint(f"{folder}/time", "{step}", train_time_interval=timedelta(0), save_top_k=-1)
    fit(world_size, f"{folder}/time", every, 1)
    found["time"] = names(f"{folder}/time")
    link = ModelCheckpoint(f"{folder}/link", "newest", save_last="link", enable_version_counter=False)
    fit(world_size, f"{folder}/link", link, 2)
    module = new()
    fit(world_size, f"{folder}/link", link, 3, module, ckpt_path="last")
    found["link"] = names(f"{folder}/link"), Path(folder, "link", "last.ckpt").is_symlink(), len(module.losses)
    small = ModelCheckpoint(f"{folder}/small", "{epoch}", save_weights_only=True)
    runner = fit(world_size, f"{folder}/small", small, 1)
    before = full_weights(runner)
    other = trainer(zero3(), world_size, limit_val_batches=1.0)
    other.validate(new(), ckpt_path=small.best_model_path, verbose=False)
    assert_same_tensors(full_weights(other), before)
    with pytest.raises(KeyError, match="save_weights_only"):
        fit(world_size, f"{folder}/small", small, 2, ckpt_path=small.best_model_path)
    runner.save_checkpoint(f"{folder}/hpc_ckpt_3.ckpt")
    module = new()
    fit(world_size, folder, ModelCheckpoint(f"{folder}/none", save_top_k=0), 2, module, ckpt_path="hpc")
    found["hpc"] = len(module.losses)
    return found


def test_the_callback_and_the_names_of_the_trainer(tmp_path):
    kept, scores, predicted, more, steps = run_ranks(best, 2, str(tmp_path / "best"), timeout=100)[0]
    assert len(kept) == 3 and "last.ckpt" in kept
    assert scores[1:] == pytest.approx([scores[0]] * 2, rel=1e-6)
    assert (predicted, more, steps) == (4, 4, 16)
    found = run_ranks(triggers, 2, str(tmp_path / "triggers"), timeout=100)
    assert found[0] == found[1]
    assert found[0]["steps"] == ["step=10.ckpt", "step=5.ckpt"]
    assert found[0]["time"] == [f"step={k}.ckpt" for k in range(1, 5)]
    assert found[0]["link"] == (["last.ckpt", "newest.ckpt"], True, 4)
    assert found[0]["hpc"] == 4


class Terminate(Callback):
    """SIGTERM for one rank in the middle of a step, as a scheduler sends it."""

    def on_before_backward(self, trainer, *_):
        if trainer.global_step == 3 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def preempted(rank, world_size, folder):
    def run(*callbacks):
        module = Shuffled()
        saver = ModelCheckpoint(folder, "{step}", every_n_epochs=1, save_top_k=-1, save_on_exception=True, save_last=True)
        options = {"enable_checkpointing": True, "use_distributed_sampler": True, "max_epochs": 2}
        runner = trainer(zero3(unit_policy=None), world_size, callbacks=[saver, *callbacks], **options)
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
    for stopped, resumed, (losses, weights) in run_ranks(preempted, 2, str(tmp_path / "run"), timeout=100):
        assert 3 < stopped[0] < 12 and f"step={stopped[0]}.ckpt" in stopped[2]
        assert stopped[1] + resumed[1] == losses
        assert resumed[0] == 12
        assert_same_tensors(resumed[2], weights)
