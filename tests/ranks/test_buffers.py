"""Sparse buffers in the Trainer: they train, are counted, and leave checkpoints alone."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from helpers.parity import trainer
from helpers.ranks import run_ranks


class Graph(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)
        self.register_buffer(
            "adjacency", torch.tril(torch.ones(4, 4)).to_sparse(), persistent=False
        )

    def training_step(self, batch):
        return self.net(self.adjacency @ batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 8), batch_size=4)


def fit(rank, world_size, folder):
    fitter = trainer("zero3", world_size, max_epochs=1)
    fitter.fit(Graph())
    fitter.save_checkpoint(f"{folder}/graph.ckpt")
    return fitter.strategy.memory_ledger()["buffers"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_sparse_buffer(world_size, tmp_path):
    expected = 10 * (2 * 8 + 4)  # ten elements: two indices of eight bytes, a value of four
    assert run_ranks(fit, world_size, str(tmp_path)) == [expected] * world_size
