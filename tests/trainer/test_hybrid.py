"""Shards within groups of ranks and replicas across them, against plain Lightning on one device
with the joined batch.
"""

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from helpers.models import Lit, Recipe
from helpers.parity import (
    assert_same_run,
    assert_same_tensors,
    fit_here,
    sharded_gradients,
    trainer,
    zero3,
)
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions

SIZES = [(4, 2), (6, 3), (6, 2)]  # ranks, of which so many share the shards
FEATURES = {
    "clip_norm": (Recipe(optimizer="adamw"), {"gradient_clip_val": 0.3}),
    "accumulate": (Recipe(steps=7), {"accumulate_grad_batches": 3}),
    "all": (
        Recipe(
            tied=True,
            optimizer="adamw",
            decay_matrices=True,
            schedule="step",
            frozen=("blocks.0",),
            steps=6,
        ),
        {"accumulate_grad_batches": 2, "max_epochs": 2, "limit_val_batches": 2},
    ),
}


def fit_all(rank, world_size, shard_size):
    runs = {}
    for name, (recipe, options) in FEATURES.items():
        recipe = replace(recipe, seed=rank)  # rank 0's weights count
        runs[name] = fit_here(recipe, zero3(shard_size=shard_size), world_size, options)
    return runs


@cache
def runs(world_size, shard_size):
    return run_ranks(fit_all, world_size, shard_size, timeout=200)


@cache
def one_process(feature):
    recipe, options = FEATURES[feature]
    return fit_here(recipe, "auto", 1, options)


@pytest.mark.parametrize("world_size, shard_size", SIZES)
@pytest.mark.parametrize("feature", FEATURES)
def test_parity(feature, world_size, shard_size):
    everyone = [rank[feature] for rank in runs(world_size, shard_size)]
    first = everyone[0]
    for other in everyone[1:]:  # replicas do not drift apart, not by a bit
        assert_same_tensors(other.gradients, first.gradients)
    first = replace(
        first,
        losses=[sum(step) / world_size for step in zip(*(r.losses for r in everyone), strict=True)],
    )
    assert_same_run(first, one_process(feature))


def look_inside(rank, world_size, shard_size, folder):
    """Losses of a run and of its continuations with and without groups, from both kinds of
    checkpoint; bytes of shards.
    """
    losses, nbytes = {}, 0
    for kind in ("sharded", "file"):
        for part, size in (("begun", shard_size), ("over all", None), ("in groups", shard_size)):
            module = Lit(Recipe(optimizer="adam", steps=6), sharded_gradients)
            strategy = zero3(shard_size=size, checkpoint=CheckpointOptions(kind=kind))
            saver = ModelCheckpoint(
                Path(folder, kind), "{step}", every_n_train_steps=3, save_top_k=-1
            )
            saving = {"callbacks": [saver], "enable_checkpointing": True} if part == "begun" else {}
            path = None if part == "begun" else os.fspath(Path(folder, kind, "step=3.ckpt"))
            trainer(strategy, world_size, **saving).fit(module, ckpt_path=path)
            losses[kind, part] = module.losses[-3:]
            if size is not None:
                nbytes = strategy.memory_ledger()["parameters"]
    return losses, nbytes, sum(p.numel() for p in module.parameters()) * 4


def test_checkpoints_and_memory(tmp_path):
    world_size, shard_size = 4, 2
    for losses, nbytes, whole in run_ranks(
        look_inside, world_size, shard_size, str(tmp_path), timeout=200
    ):
        assert whole / shard_size <= nbytes <= 1.1 * whole / shard_size
        assert losses["sharded", "in groups"] == losses["file", "in groups"]
        assert losses["sharded", "over all"] == losses["file", "over all"]
        # Four summands in another order.
        assert losses["file", "in groups"] == pytest.approx(losses["file", "over all"], rel=1e-5)
        assert losses["file", "in groups"] != pytest.approx(losses["file", "begun"], rel=1e-2)


def refuse(rank, world_size):
    said = []
    for size in (1, 2, 4):
        with pytest.raises(ValueError) as error:
            trainer(zero3(shard_size=size), world_size).fit(Lit(Recipe(), sharded_gradients))
        said.append(str(error.value))
    return said


def test_a_size_that_does_not_divide_is_refused():
    for said in run_ranks(refuse, 3):
        for size, text in zip((1, 2, 4), said, strict=True):
            assert text.startswith(
                f"shard_size={size} must be at least 2 and divide the number of ranks, 3."
            )
