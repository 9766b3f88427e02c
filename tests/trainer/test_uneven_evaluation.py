"""Evaluation of loaders that users share out themselves, to each rank another number of batches: as one process does it."""

from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from helpers.parity import RTOL, trainer, zero3
from helpers.ranks import run_ranks

COUNTS = {2: [(3, 1), (1, 4)], 3: [(2, 1, 4), (1, 1, 1)]}  # ranks -> batches of each rank, of each of two loaders


class Field(pl.LightningModule):
    """A force field: its forces are derivatives, in evaluation too."""

    def __init__(self, loaders, share):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.mean, self.loaders, self.share = MeanMetric(), loaders, share

    def forward(self, x):
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            energy = self.net(x).square().sum(1)
            (force,) = torch.autograd.grad(energy.sum(), x)
        return energy.detach(), force.norm(dim=1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        energy, force = self(batch)
        self.mean.update(force)
        log = {"sync_dist": True, "batch_size": len(batch)}
        self.log("force", force.mean(), **log)
        self.log("sum", energy.sum(), reduce_fx="sum", **log)
        self.log("max", energy.max(), reduce_fx="max", **log)
        if dataloader_idx == 0:
            self.log("metric", self.mean)

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch)[1]

    def train_dataloader(self):
        joined = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(9))
        index, number = self.share
        return DataLoader([batch.chunk(number)[index] for batch in joined], batch_size=None)

    def val_dataloader(self):
        return self.loaders

    test_dataloader = predict_dataloader = val_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(ranks, loader, rank):
    count = COUNTS[ranks][loader][rank]
    sizes = [1 + (k + rank) % 3 for k in range(count)]
    seeds = [torch.Generator().manual_seed(100 * loader + 10 * rank + k) for k in range(count)]
    return [torch.randn(n, 6, generator=seed) for n, seed in zip(sizes, seeds, strict=True)]


def evaluate(rank, world_size, ranks):
    """All ways to evaluate; a single process has the batches of all ``ranks``, rank by rank."""
    whose = [rank] if world_size > 1 else range(ranks)
    loaders = [DataLoader([b for r in whose for b in batches(ranks, i, r)], batch_size=None) for i in range(2)]
    module = Field(loaders, (rank, world_size))
    found = {}
    for stage in ("validate", "test", "predict", "fit"):
        strategy = zero3(unit_policy=["Linear"]) if world_size > 1 else "auto"
        runner = trainer(strategy, world_size, limit_val_batches=1.0, num_sanity_val_steps=2, max_epochs=2)
        predictions = getattr(runner, stage)(module)
        metrics = {name: value.item() for name, value in runner.callback_metrics.items()}
        found[stage] = predictions if stage == "predict" else metrics
    return found


@cache
def results(world_size, ranks):
    return run_ranks(evaluate, world_size, ranks, timeout=60)


@pytest.mark.parametrize("ranks", COUNTS)
def test_as_one_process(ranks):
    (expected,), everyone = results(1, ranks), results(ranks, ranks)
    for found in everyone:
        for stage in ("validate", "test", "fit"):
            assert len(expected[stage]) == 2 * 3 + 1, expected[stage]
            assert found[stage] == pytest.approx(expected[stage], rel=2 * RTOL), stage
    assert expected["fit"] != pytest.approx(expected["validate"], rel=1e-3), "training changed nothing"
    for loader, whole in enumerate(expected["predict"]):
        joined = [force for found in everyone for force in found["predict"][loader]]
        assert [len(found["predict"][loader]) for found in everyone] == list(COUNTS[ranks][loader])
        torch.testing.assert_close(joined, whole, rtol=2 * RTOL, atol=1e-6)


class Endless(IterableDataset):
    """It does not say how long it is."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.ones(self.count, 2, 6))


def evaluate_unsized(rank, world_size, stage):
    module = Field([DataLoader(Endless(1 + 2 * rank), batch_size=None)], (0, 1))
    getattr(trainer(zero3(unit_policy=["Linear"]), world_size, limit_val_batches=1.0), stage)(module)


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_another_number_of_batches_than_the_loader_says_is_an_error(stage):
    with pytest.raises(AssertionError, match=r"The ranks run different things: rank \d is about to"):
        run_ranks(evaluate_unsized, 2, stage, timeout=60)
