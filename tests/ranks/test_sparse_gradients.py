"""Gradients that autograd or the user makes sparse, of weights that rest, are those of dense
ones.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine


class Reader(nn.Module):
    """Looks rows up in the table of another module."""

    def __init__(self, table):
        super().__init__()
        self.of_another = [table]
        self.scale = nn.Linear(4, 4)

    def forward(self, rows):
        return self.scale(F.embedding(rows, self.of_another[0].weight, sparse=True))


def build():
    torch.manual_seed(0)
    table = nn.Embedding(6, 4)
    return nn.ModuleList([table, Reader(table)])


def loss_of(model, rank):
    return model[1](torch.tensor([rank, 3])).square().mean()


def shard_and_train(rank, world_size):
    model, device = build(), torch.device("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    collectives = make_collectives(dist.group.WORLD, device)
    engine = Zero3Engine(
        model, [optimizer], device=device, collectives=collectives, unit_policy=list
    )
    with engine.step():
        loss = loss_of(model, rank)
    with engine.backward():
        loss.backward()
    weight = model[0].weight
    reduced = weight.grad.clone()
    weight.grad = torch.eye(6, 4).to_sparse()
    return reduced, weight.grad.clone()


def test_of_a_weight_that_another_module_reads():
    model = build()
    (sum(loss_of(model, rank) for rank in range(2)) / 2).backward()
    for reduced, assigned in run_ranks(shard_and_train, 2):
        torch.testing.assert_close(reduced, model[0].weight.grad.to_dense(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(assigned, torch.eye(6, 4), rtol=0, atol=0)
