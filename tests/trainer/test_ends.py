"""Ranks end their training together: runs that are right end as ever, and no rank of one that is
not ends well.
"""

import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, Timer
from torch import nn
from torch.utils.data import DataLoader

from helpers.parity import trainer
from helpers.ranks import run_ranks
from lightning_zero3 import Zero3Strategy
from lightning_zero3.strategies.collectives import DivergenceError


class Model(pl.LightningModule):
    """Counts its steps."""

    def __init__(self, samples=12):
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.net, self.samples, self.steps, self.lr = nn.Linear(3, 1), samples, 0, 0.1

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        return DataLoader(torch.ones(self.samples, 3), batch_size=2)


class Stop(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = batch_idx == 1


class Late(Timer):
    """A second has gone by on rank 0 after two batches, never on others."""

    batches = 0

    def time_elapsed(self, *args):
        return 0.5 * self.batches

    def on_train_batch_end(self, trainer, *args):
        self.batches += trainer.global_rank == 0
        super().on_train_batch_end(trainer, *args)


class Upload(Callback):
    """Rank 0 works alone in the end, until rank 1's `fit` is over: nobody waits for it."""

    def __init__(self, folder):
        self.over = Path(folder, "over")

    def on_train_end(self, trainer, pl_module):
        until = time.monotonic() + 30
        while trainer.global_rank == 0 and not self.over.exists():
            assert time.monotonic() < until
            time.sleep(0.01)

    def teardown(self, trainer, pl_module, stage):
        if trainer.global_rank == 1:
            self.over.touch()


RIGHT = {  # options of the Trainer (every other fit has no watch); steps
    "all batches": ({}, 6),
    "several epochs": ({"max_epochs": 3}, 18),
    "max_steps": ({"max_steps": 4}, 4),
    "should_stop": ({"callbacks": [Stop]}, 2),
    "max_time": ({"callbacks": [lambda: Late({"seconds": 1})]}, 2),
    "a learning rate is found first": (
        {"callbacks": [lambda: LearningRateFinder(num_training_steps=5)]},
        11,
    ),
    "nothing to do": ({"max_steps": 0}, 0),
    "no batches": ({"limit_train_batches": 0}, 0),
}


def end_well(rank, size, folder):
    found = {}
    for name, (options, _) in RIGHT.items():
        made = {**options, "callbacks": [make() for make in options.get("callbacks", [])]}
        model, strategy = Model(), Zero3Strategy(watch=None) if len(found) % 2 else Zero3Strategy()
        trainer(strategy, size, default_root_dir=folder, **made).fit(model)
        found[name] = model.steps
    shared_out = Model(samples=11)  # three batches for one rank, three and a half for the other
    trainer("zero3", size, use_distributed_sampler=True).fit(shared_out)
    found["shared out"] = shared_out.steps
    if size > 1:
        trainer("zero3", size, callbacks=[Upload(folder)]).fit(Model())
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_right_runs_end_as_ever(size, tmp_path):
    for found in run_ranks(end_well, size, str(tmp_path), timeout=100):
        shared_out = found.pop("shared out")
        assert found == {name: steps for name, (_, steps) in RIGHT.items()}
        assert shared_out == 6 // size


def end_apart(rank, size):
    told = []
    for short in (8, 0):  # samples of rank 1
        with pytest.raises(DivergenceError) as caught:
            trainer(Zero3Strategy(watch=None), size).fit(Model(short if rank == 1 else 12))
        told.append(str(caught.value))
    return told


def test_another_number_of_batches_is_an_error_of_every_rank():
    first, second = run_ranks(end_apart, 2)
    for said in zip(first, second, strict=True):
        assert "rank 0 is about to " in said[0] and "rank 1 to end its training" in said[0], said
        assert (
            "rank 1 is about to end its training" in said[1]
            and "loaders of different length" in said[1]
        ), said
