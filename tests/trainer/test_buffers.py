"""Buffers that change in training are rank 0's on every rank, bitwise as under ddp."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers.parity import assert_same_tensors, trainer
from helpers.ranks import run_ranks
from lightning_zero3.strategies.engine import partition


class Codebook(nn.Module):
    """A buffer that forward changes and computes with, and one that it replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("mask", torch.ones(8, dtype=torch.bool))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
            self.steps = self.steps + 1
        return (x - self.mean) * self.mask / (1 + self.steps)


class FunctionalNorm(nn.Module):
    """Torch writes these statistics without counting a version."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(8))
        self.register_buffer("running_var", torch.ones(8))

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=self.training)


class Normed(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 8),
            Codebook(),
            nn.BatchNorm1d(8),
            nn.Linear(8, 8),
            FunctionalNorm(),
            nn.Linear(8, 1),
        )
        self.losses, self.seen = [], []

    def training_step(self, batch):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch):
        self.losses.append(self.net(batch).square().mean().item())
        self.seen.append({name: b.clone() for name, b in self.named_buffers()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        rank = self.trainer.global_rank
        data = torch.randn(12, 8, generator=torch.Generator().manual_seed(rank)) + rank
        return torch.utils.data.DataLoader(data, batch_size=4)

    val_dataloader = train_dataloader


class BackwardTwice(Normed):
    """As the second half of a GAN's step: the second graph has saved running statistics before the
    first backward.
    """

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net[1], self.net[4] = nn.Identity(), nn.Identity()

    def training_step(self, batch):
        hidden = self.net[:3](batch)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        losses = self.net[3:](hidden.detach()).square().mean(), self.net[3:](hidden).tanh().mean()
        for loss in losses:
            self.manual_backward(loss, retain_graph=loss is losses[0])
        optimizer.step()
        self.losses += [loss.item() for loss in losses]


def _fit(rank, world_size, module_class):
    partition.SMALL_NUMEL = 0  # every layer is a unit of its own
    runs = []
    for strategy in ("ddp_find_unused_parameters_true", "zero3"):
        module = module_class()
        fitter = trainer(strategy, world_size, max_epochs=2, limit_val_batches=1.0)
        fitter.fit(module)
        assert strategy != "zero3" or len(fitter.strategy.engine.units) == 4
        runs.append((module.losses, module.seen))
    return runs


@pytest.mark.parametrize("world_size", [1, 2])
def test_as_ddp(world_size):
    everyone = run_ranks(_fit, world_size, Normed)
    for (ddp_losses, ddp_seen), (losses, seen) in everyone:
        assert losses == ddp_losses
        assert len(seen) == 6
        assert_same_tensors(seen, ddp_seen)
        assert_same_tensors(seen, everyone[0][1][1])


def test_between_two_backwards_of_a_step_they_stay_as_they_were_saved():
    (ddp_runs, runs), (_, runs_of_rank_1) = run_ranks(_fit, 2, BackwardTwice)
    assert len(runs[0]) == 18
    # ddp averages the sum of both gradients, zero3 adds averages; ddp's rank 1 validates with
    # statistics of its own here.
    assert runs[0] == pytest.approx(ddp_runs[0], rel=1e-6)
    assert_same_tensors(runs_of_rank_1[1], runs[1])
