"""One rank reads what is sharded while the others do something else: an error on each that names both, and no hang."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import DivergenceError

READS = {
    "gradient": lambda module: module.net[0].weight.grad,
    "gathered": lambda module: module.trainer.strategy.gathered(module).__enter__(),
    "forward": lambda module: module.net(torch.ones(1, 4)),
    "values": lambda module: module.trainer.strategy.engine.units[-1].values(),
}
ELSEWHERE = {
    "wait for the others at a barrier": lambda module: module.trainer.strategy.barrier(),
    "reduce a value over the ranks": lambda module: module.trainer.strategy.reduce(torch.ones(1)),
    "broadcast or collect Python objects": lambda module: module.trainer.strategy.broadcast("a path"),
    "broadcast or all-gather values": lambda module: module.all_gather(torch.ones(1)),
}


class Asymmetric(pl.LightningModule):
    def __init__(self, read, other):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        self.read, self.other, self.message = READS[read], ELSEWHERE[other], ""

    def training_step(self, batch):
        return self.net(batch).sum()

    def on_before_optimizer_step(self, optimizer):
        with pytest.raises(DivergenceError) as caught:
            (self.read if self.global_rank == 0 else self.other)(self)
        self.message = str(caught.value)
        raise KeyError("seen")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=1)


def _fit(rank, world_size, read, other):
    module = Asymmetric(read, other)
    with pytest.raises(KeyError, match="seen"):
        trainer(zero3(unit_policy=["Linear"]), world_size).fit(module)
    return module.message


@pytest.mark.parametrize("read, other", list(zip(READS, ELSEWHERE, strict=True)))
def test_both_ranks_are_told(read, other):
    for rank, message in enumerate(run_ranks(_fit, 2, read, other, timeout=60)):
        assert f"rank {rank} is about to" in message
        assert "gather unit net" in message and other in message
