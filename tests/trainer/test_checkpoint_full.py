"""One full checkpoint file: what any strategy writes, any other reads, and nothing is lost on the
way.
"""

import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from helpers.models import Lit, Recipe, TinyLm
from helpers.parity import (
    assert_same_tensors,
    assert_tensors_close,
    full_state,
    relative,
    trainer,
    zero3,
)
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions

# Everything that has state: two moments and a step count in two groups, a scheduler, a tie, a
# frozen part.
RECIPE = Recipe(
    tied=True,
    optimizer="adamw",
    decay_matrices=True,
    schedule="step",
    frozen=("blocks.1",),
    steps=4,
)
# The spare layer gets its first gradient in the second epoch: until then no optimizer state of it
# exists.
SPARE = Recipe(optimizer="adamw", schedule="one_cycle", steps=4)


def no_gradients(module):
    return {}


class SpareLit(Lit):
    def __init__(self, recipe, full_gradients):
        super().__init__(recipe, full_gradients)
        generator = torch.Generator().manual_seed(5)
        self.spare = nn.Linear(13, 13)
        with torch.no_grad():
            self.spare.weight.copy_(torch.randn(13, 13, generator=generator) / 4)
            self.spare.bias.zero_()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch == 1:
            loss = loss + self.spare(torch.ones(2, 13)).square().mean()
            self.losses[-1] = loss.item()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-2, weight_decay=0.2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


KINDS = {"plain": (Lit, RECIPE), "spare": (SpareLit, SPARE)}


def full():
    return zero3(checkpoint=CheckpointOptions(kind="file"))


def strategy_for(kind):
    return full() if kind == "zero3" else kind


def epochs(rank, world_size, what, strategy, until, read=None, write=None):
    """Train until the end of epoch ``until``; return the losses of this call and the final
    weights.
    """
    build, recipe = KINDS[what]
    module = build(recipe, no_gradients)
    runner = trainer(strategy_for(strategy), world_size, max_epochs=until)
    runner.fit(module, ckpt_path=read)
    if write is not None:
        runner.save_checkpoint(write)
    state = full_state(runner)
    return module.losses, {name: value.clone() for name, value in state.items()}, runner.global_step


def on(world_size, *args):
    runs = run_ranks(epochs, world_size, *args, timeout=60)
    losses = [sum(step) / world_size for step in zip(*(run[0] for run in runs), strict=True)]
    assert len({run[2] for run in runs}) == 1
    return losses, runs[0][1]


@cache
def uninterrupted(what):
    losses, state, steps = epochs(0, 1, what, "auto", 2)
    assert steps == 8
    return losses, state


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Checkpoints after the first epoch, by (module, strategy, world size)."""
    folder, written = tmp_path_factory.mktemp("checkpoints"), {}

    def file(what, strategy, world_size):
        key = (what, strategy, world_size)
        if key not in written:
            path = str(folder / f"{what}-{strategy}-{world_size}.ckpt")
            if strategy == "auto":
                epochs(0, 1, what, "auto", 1, None, path)
            else:
                on(world_size, what, strategy, 1, None, path)
            written[key] = path
        return written[key]

    return file


def steps(rank, world_size, strategy, until, read=None, write=None):
    """Train until step ``until``, in the middle of the first epoch of four or in the next one."""
    runner = trainer(strategy_for(strategy), world_size, max_epochs=-1, max_steps=until)
    runner.fit(Lit(RECIPE, no_gradients), ckpt_path=read)
    if write is not None:
        runner.save_checkpoint(write)
    return runner.global_step


@pytest.mark.parametrize(
    "world_size, strategy", [(1, "auto"), (2, "ddp"), (1, "zero3"), (2, "zero3")]
)
def test_any_strategy_goes_on_from_the_middle_of_an_epoch(tmp_path, world_size, strategy):
    path = str(tmp_path / "two.ckpt")
    assert run_ranks(steps, 2, "zero3", 2, None, path, timeout=60) == [2, 2]
    assert run_ranks(steps, world_size, strategy, 6, path, timeout=60) == [6] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("what", KINDS)
def test_resumed_is_uninterrupted_to_the_bit(files, what, world_size):
    losses, state = on(world_size, what, "zero3", 2)
    resumed_losses, resumed_state = on(
        world_size, what, "zero3", 2, files(what, "zero3", world_size)
    )
    assert len(resumed_losses) == 4 and resumed_losses == losses[4:]
    assert_same_tensors(resumed_state, state)


@pytest.mark.parametrize(
    "writer, reader",
    [
        (("zero3", 2), ("auto", 1)),
        (("zero3", 3), ("ddp", 2)),
        (("zero3", 2), ("zero3", 3)),
        (("zero3", 4), ("zero3", 1)),
        (("auto", 1), ("zero3", 2)),
        (("ddp", 2), ("zero3", 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("what", KINDS)
def test_any_strategy_goes_on_from_any_file(files, what, writer, reader):
    if what == "spare" and "ddp" in (writer[0], reader[0]):
        # ddp refuses unused parameters
        reader, writer = [("zero3", k) if s == "ddp" else (s, k) for s, k in (reader, writer)]
    path = files(what, *writer)
    if reader[0] == "auto":
        losses, state, _ = epochs(0, 1, what, "auto", 2, path)
    else:
        losses, state = on(reader[1], what, reader[0], 2, path)
    expected_losses, expected_state = uninterrupted(what)
    assert relative(losses, expected_losses[4:]) <= 2e-6
    assert_tensors_close(state, expected_state, 5e-6)


def told_of_places(rank, world_size, folder):
    """Go on with zero3 from files that one device and zero3 wrote in the middle (2) and at the end
    (4) of an epoch.
    """
    said = {}
    for strategy in ("auto", "zero3"):
        saver = ModelCheckpoint(
            f"{folder}/{strategy}", "{step}", every_n_train_steps=2, save_top_k=-1
        )
        saving = {"callbacks": [saver], "enable_checkpointing": True}
        trainer(strategy_for(strategy), use_distributed_sampler=True, **saving).fit(
            Lit(RECIPE, no_gradients)
        )
        for step in (2, 4) if strategy == "auto" else (2,):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                reader = trainer(full(), use_distributed_sampler=True, max_epochs=2)
                reader.fit(
                    Lit(RECIPE, no_gradients), ckpt_path=f"{folder}/{strategy}/step={step}.ckpt"
                )
            told = [str(w.message) for w in found if "where its loaders were" in str(w.message)]
            said[strategy, step] = [text[:53] for text in told]
    return said


def test_samples_that_come_again_are_told(tmp_path):
    (said,) = run_ranks(told_of_places, 1, str(tmp_path))
    words = "The checkpoint was made after batch 2 of an epoch, by"
    assert said == {("auto", 2): [words], ("auto", 4): [], ("zero3", 2): []}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("what", KINDS)
def test_the_file_is_what_one_device_writes(files, what, world_size):
    mine = torch.load(files(what, "zero3", world_size), weights_only=True)
    alone = torch.load(files(what, "auto", 1), weights_only=True)
    assert alone.keys() == mine.keys()
    assert_tensors_close(mine["state_dict"], alone["state_dict"])
    assert list(mine["state_dict"]) == list(alone["state_dict"])
    for key in ("epoch", "global_step", "lr_schedulers"):
        assert mine[key] == alone[key]
    (optimizer,), (expected,) = mine["optimizer_states"], alone["optimizer_states"]
    assert optimizer["param_groups"] == expected["param_groups"]
    assert optimizer["state"].keys() == expected["state"].keys()
    assert_tensors_close(optimizer["state"], expected["state"], 1e-5)
    # A tensor that views a flat one would have taken all of that into the file with it.
    for tensor in (
        *mine["state_dict"].values(),
        *(t for state in optimizer["state"].values() for t in state.values()),
    ):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_read_without_a_trainer(files):
    path = files("plain", "zero3", 2)
    expected = torch.load(files("plain", "auto", 1), weights_only=True)["state_dict"]
    module = Lit.load_from_checkpoint(
        path, recipe=Recipe(tied=True, seed=9), full_gradients=no_gradients
    )
    assert_tensors_close(dict(module.state_dict()), dict(expected))
    net = TinyLm(tied=True)
    state = torch.load(path, weights_only=True)["state_dict"]
    net.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
    assert net.head.weight is net.embed.weight


# ---- callbacks -------------------------------------------------------------------------------


def with_callback(rank, world_size, folder):
    def keep():
        return ModelCheckpoint(
            folder, monitor="val_loss", save_top_k=1, save_last=True, filename="{epoch}"
        )

    def fit(module, epochs, callback, **paths):
        options = {"enable_checkpointing": True, "callbacks": [callback], "limit_val_batches": 1.0}
        runner = trainer(full(), world_size, max_epochs=epochs, default_root_dir=folder, **options)
        runner.fit(module, **paths)
        return runner

    module, first = Lit(RECIPE, no_gradients), keep()
    runner = fit(module, 2, first)
    path, score = first.best_model_path, first.best_model_score.item()
    (best,) = runner.test(module, ckpt_path="best", verbose=False)
    fresh = Lit(replace(RECIPE, seed=3), no_gradients)
    runner = trainer(full(), world_size, limit_val_batches=1.0)
    (loaded,) = runner.validate(fresh, ckpt_path=path, verbose=False)
    runner.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    again = Lit(RECIPE, no_gradients)
    fit(again, 3, keep(), ckpt_path="last")
    return path, score, best["val_loss"], loaded["val_loss"], len(again.losses)


def test_model_checkpoint(tmp_path):
    results = run_ranks(with_callback, 2, str(tmp_path), timeout=60)
    assert len(set(results)) == 1
    path, score, tested, validated, steps = results[0]
    assert tested == pytest.approx(score, rel=1e-6)
    assert validated == pytest.approx(score, rel=1e-6)
    assert steps == 4, "last.ckpt is of the second epoch, so one epoch was left"
    assert (tmp_path / "last.ckpt").is_file()
    small = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    expected = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert (
        "optimizer_states" not in small
        and small["state_dict"].keys() == expected["state_dict"].keys()
    )


class Emptied(Lit):
    """Tensors without elements, of which torch writes each."""

    def __init__(self):
        super().__init__(RECIPE, no_gradients)
        self.register_buffer("first", torch.empty(0))
        self.register_buffer("second", torch.empty(0, 3))


def save_empty(rank, world_size, path):
    fitter = trainer(full(), world_size, max_epochs=1)
    fitter.fit(Emptied())
    fitter.save_checkpoint(path)


def test_tensors_without_elements_are_saved(tmp_path):
    run_ranks(save_empty, 2, str(tmp_path / "empty.ckpt"))
    state = torch.load(tmp_path / "empty.ckpt", weights_only=True)["state_dict"]
    assert (state["first"].shape, state["second"].shape) == ((0,), (0, 3))
