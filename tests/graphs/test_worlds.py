"""Captured steps of zero3 on one, two and four ranks, and a difference that one rank alone finds."""

from functools import partial

import pytest
import torch
from torch import nn

from graphs.test_ranks import compare, warned
from helpers.ranks import run_ranks
from helpers.recorded import WIDTH, Counting, Net, assert_same_run, fit
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.callbacks.graphs.runner import GraphCaptureError

UNITS = partial(Zero3Strategy, unit_policy=[nn.Linear])


def both_ways(rank, world_size):
    options = {"max_epochs": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    return compare(partial(Net, scheduled=True), [], strategy=UNITS, devices=world_size, **options)


@pytest.mark.parametrize(
    ("world_size", "replays"),
    # Eleven, six or three micro-batches in an epoch, of which three are watched, three verified (of
    # few the first of an epoch among them), and the first of each later epoch.
    [
        (1, 44 - 3 - 3 - 3),
        (2, 24 - 3 - 2 - 3),
        pytest.param(4, 12 - 3 - 2 - 3, marks=pytest.mark.variant),
    ],
)
def test_a_captured_run_is_the_eager_run(world_size, replays):
    assert run_ranks(both_ways, world_size, timeout=100) == [(replays, 0)] * world_size


class ReadsASharded(Net):
    """A parameter of the module itself, before its forward runs: it is read as sharded."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def training_step(self, batch, batch_idx):
        return super().training_step({**batch, "x": batch["x"] + self.shift}, batch_idx)


def read_sharded(rank, world_size):
    return compare(ReadsASharded, [], strategy=UNITS, devices=world_size, max_epochs=2)


def test_weights_that_are_read_outside_of_a_use_are_captured():
    (first, _), (second, _) = run_ranks(read_sharded, 2, timeout=100)
    assert first == second > 0


STEPS = {"count": 0}


class CountsOnRankOne(Net):
    """With a number that no fingerprint sees."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        STEPS["count"] += self.global_rank
        return {**output, "scaled": output["loss"].detach() * (1 + STEPS["count"])}

    def on_train_start(self):
        STEPS["count"] = 0


def differ_on_rank_one(rank, world_size):
    options = {"strategy": UNITS, "devices": world_size, "num_sanity_val_steps": 0}
    callback = Counting(software=True)
    said, mine = warned(CountsOnRankOne(), callback, **options)
    assert_same_run(mine, fit(CountsOnRankOne(), **options))
    with pytest.raises(GraphCaptureError) as error:
        fit(CountsOnRankOne(), CUDAGraphStep(software=True, strict=True), **options)
    return said, str(error.value), (callback.replays, callback.verified)


def test_a_difference_on_one_rank_leaves_all_eager_and_is_an_error_of_all_with_strict():
    (first, error, counts), (second, other_error, other_counts) = run_ranks(differ_on_rank_one, 2)
    message = (
        "CUDAGraphStep: the training step cannot be captured on rank 1:\n  - An eager run and its"
        " replay are not the same: the output['scaled'] is "
    )
    assert error == other_error and error.startswith(message)
    assert first[0].startswith(error) and second == []
    assert counts == other_counts == (1, 1)  # captured in the fourth, found in the fifth
