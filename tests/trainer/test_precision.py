"""Every precision: two ranks end where one process ends, bit by bit.

One rank's loss counts twice and the other's not at all, so that the mean of their gradients is exact whatever it is rounded to,
and differs from either.
"""

from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers.parity import full_state, trainer, zero3
from helpers.ranks import run_ranks

DTYPES = {
    "32-true": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "64-true": torch.float64,
}


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.detach().clone())
        return loss if self.trainer.world_size == 1 else loss * (2, 0)[self.trainer.global_rank]

    def configure_optimizers(self):
        # Powers of two: whether a product is rounded before it is added depends on an element's place in memory.
        return torch.optim.SGD(self.parameters(), lr=0.125, momentum=0.5, weight_decay=0.0625)

    def train_dataloader(self):
        return DataLoader(list(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))), batch_size=None)


def fit(rank, world_size):
    found = {}
    for precision in DTYPES:
        strategy = "auto" if world_size == 1 else zero3(unit_policy=[nn.Linear])
        fitter = trainer(strategy, world_size, precision=precision)
        fitter.fit(module := Model())
        found[precision] = module.losses, {name: value.clone() for name, value in full_state(fitter).items()}
    return found


@cache
def results(world_size):
    return run_ranks(fit, world_size, timeout=100)


@pytest.mark.parametrize("precision", DTYPES)
def test_two_ranks_are_one_process(precision):
    (expected,) = (found[precision] for found in results(1))
    everyone = [found[precision] for found in results(2)]
    for losses, _ in everyone:
        assert torch.equal(torch.stack(losses), torch.stack(expected[0])) and losses[0] != losses[-1]
    state = everyone[0][1]
    assert state.keys() == expected[1].keys()
    for name, value in state.items():
        assert value.dtype == expected[1][name].dtype == DTYPES[precision]
        assert torch.equal(value, expected[1][name]), name
