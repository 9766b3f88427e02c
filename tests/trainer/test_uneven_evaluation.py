"""Evaluation of loaders that users share out themselves, to each rank another number of batches: as
one process does it.
"""

from functools import cache

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import CatMetric, SpearmanCorrCoef
from torchmetrics.classification import BinaryAUROC

from helpers.models import ForceField
from helpers.parity import RTOL, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.data import NoBatch

# ranks -> batches of each rank, of each of two loaders
COUNTS = {
    2: [(3, 1), (1, 4)],
    3: [(2, 1, 4), (1, 1, 1)],
}


def batches(ranks, loader, rank):
    count = COUNTS[ranks][loader][rank]
    sizes = [1 + (k + rank) % 3 for k in range(count)]
    seeds = [torch.Generator().manual_seed(100 * loader + 10 * rank + k) for k in range(count)]
    return [torch.randn(n, 6, generator=seed) for n, seed in zip(sizes, seeds, strict=True)]


class Transformed(ForceField):
    """By torch.func."""

    def forward(self, x):
        def energy(x):
            return self.net(x).square().sum(1)

        return energy(x).detach(), torch.func.grad(lambda x: energy(x).sum())(x).norm(dim=1)


def evaluate(rank, world_size, ranks, kind):
    """All ways to evaluate; a single process has the batches of all ``ranks``, rank by rank."""
    whose = [rank] if world_size > 1 else range(ranks)
    loaders = [
        DataLoader([b for r in whose for b in batches(ranks, i, r)], batch_size=None)
        for i in range(2)
    ]
    joined = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(9))
    train = DataLoader([batch.chunk(world_size)[rank] for batch in joined], batch_size=None)
    module, found = kind(), {}
    for stage in ("validate", "test", "predict", "fit"):
        strategy = zero3(unit_policy=["Linear"]) if world_size > 1 else "auto"
        runner = trainer(
            strategy, world_size, limit_val_batches=1.0, num_sanity_val_steps=2, max_epochs=2
        )
        predictions = getattr(runner, stage)(
            module, *([train, loaders] if stage == "fit" else [loaders])
        )
        metrics = {name: value.item() for name, value in runner.callback_metrics.items()}
        found[stage] = predictions if stage == "predict" else metrics
        found[f"{stage}'s dtypes"] = {k: v.dtype for k, v in runner.callback_metrics.items()}
    return found


@cache
def results(world_size, ranks, kind):
    return run_ranks(evaluate, world_size, ranks, kind, timeout=60)


@pytest.mark.parametrize("kind", [ForceField, Transformed])
@pytest.mark.parametrize("ranks", COUNTS)
def test_as_one_process(ranks, kind):
    (expected,), everyone = results(1, ranks, ForceField), results(ranks, ranks, kind)
    for found in everyone:
        for stage in ("validate", "test", "fit"):
            assert len(expected[stage]) == 2 * 4 + 2, expected[stage]
            assert found[stage] == pytest.approx(expected[stage], rel=2 * RTOL), stage
            assert found[f"{stage}'s dtypes"] == expected[f"{stage}'s dtypes"]
    assert expected["fit"] != pytest.approx(expected["validate"], rel=1e-3), (
        "training changed nothing"
    )
    for loader, whole in enumerate(expected["predict"]):
        joined = [force for found in everyone for force in found["predict"][loader]]
        assert [len(found["predict"][loader]) for found in everyone] == list(COUNTS[ranks][loader])
        torch.testing.assert_close(joined, whole, rtol=2 * RTOL, atol=1e-6)


class Writes(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epoch = [], None

    def write_on_batch_end(self, trainer, module, prediction, *args):
        self.batches.append(prediction)

    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.epoch = list(predictions)


def write_predictions(rank, world_size):
    writer = Writes()
    options = {"use_distributed_sampler": True, "callbacks": [writer]}
    runner = trainer(zero3(unit_policy=["Linear"]), world_size, **options)
    whole = torch.randn(5, 6, generator=torch.Generator().manual_seed(5))
    predictions = runner.predict(ForceField(), DataLoader(whole[:1], batch_size=1))
    return len(predictions), *(
        [isinstance(p, NoBatch) for p in written] for written in (writer.batches, writer.epoch)
    )


def test_a_writer_gets_no_batch_for_the_prediction_where_there_is_none():
    with_one, without = run_ranks(write_predictions, 2, timeout=60)
    assert with_one == (1, [False], [False]) and without == (0, [True], [True])


class Endless(IterableDataset):
    """It does not say how long it is."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(torch.ones(self.count, 2, 6))


def evaluate_unsized(rank, world_size, stage):
    runner = trainer(zero3(unit_policy=["Linear"]), world_size, limit_val_batches=1.0)
    getattr(runner, stage)(ForceField(), DataLoader(Endless(1 + 2 * rank), batch_size=None))


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_another_number_of_batches_than_the_loader_says_is_an_error(stage):
    with pytest.raises(
        AssertionError, match=r"The ranks run different things: rank \d is about to"
    ):
        run_ranks(evaluate_unsized, 2, stage, timeout=60)


class Scoring(ForceField):
    """Metrics whose states are lists: whole numbers, and rows, beside numbers."""

    def __init__(self):
        super().__init__()
        self.auroc = BinaryAUROC(thresholds=None)
        self.rank = SpearmanCorrCoef(num_outputs=2)
        self.kept = CatMetric()

    def validation_step(self, batch, batch_idx):
        self.auroc(batch[:, 0], (batch[:, 1] > 0).long())
        self.rank(batch[:, :2], batch[:, 2:4])
        self.kept(batch[0, 0])
        self.log("auroc", self.auroc)

    def on_validation_epoch_end(self):
        self.log("rank", self.rank.compute().sum())
        self.log("kept", self.kept.compute().sum())
        self.rank.reset()
        self.kept.reset()


def score(rank, world_size, samples):
    data = torch.randn(samples, 6, generator=torch.Generator().manual_seed(5))
    strategy = zero3(unit_policy=["Linear"]) if world_size > 1 else "auto"
    runner = trainer(strategy, world_size, limit_val_batches=1.0, use_distributed_sampler=True)
    runner.validate(Scoring(), DataLoader(data, batch_size=1))
    return {name: value.item() for name, value in runner.callback_metrics.items()}


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_metrics_of_ranks_without_a_sample(samples):
    (expected,) = run_ranks(score, 1, samples)
    assert len(expected) == 3
    for found in run_ranks(score, 2, samples, timeout=60):
        assert found == pytest.approx(expected, nan_ok=True)
