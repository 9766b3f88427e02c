"""Several backward passes in one `training_step`, of losses that do not run the same units, train
as in one process.
"""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from helpers.models import JOINED, Block, make, part
from helpers.parity import RTOL, assert_tensors_close, full_state, relative, trainer, zero3
from helpers.ranks import run_ranks

STEPS = 3


class Gan(pl.LightningModule):
    """Steps generator and critic after several losses, some of which run the critic alone."""

    def __init__(self, losses, rank, world_size):
        super().__init__()
        self.automatic_optimization = False
        self.generator = make(lambda: Block(6), 1)
        self.critic = make(lambda: nn.Sequential(Block(6), nn.Linear(6, 1, bias=False)), 2)
        self.kinds, self.rank, self.world_size, self.losses = losses, rank, world_size, []

    def loss(self, kind, batch):
        real, noise = batch
        if kind == "made":
            loss = F.softplus(self.critic(self.generator(noise))).mean()
        else:
            loss = sum(
                F.softplus(-self.critic(k * real)).mean()
                for k in range(1, 3 if kind == "real twice" else 2)
            )
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch, batch_idx):
        for kind in self.kinds:
            self.manual_backward(self.loss(kind, batch))
        self.update()

    def update(self):
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            for net in (self.generator, self.critic)
        ]

    def train_dataloader(self):
        draw = torch.Generator().manual_seed(0)
        batches = [
            (torch.randn(JOINED, 6, generator=draw) + 1, torch.randn(JOINED, 6, generator=draw))
            for _ in range(STEPS)
        ]
        return DataLoader(
            [part(batch, self.rank, self.world_size) for batch in batches], batch_size=None
        )


class AfterTheStep(Gan):
    """The last loss comes when the step is over."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(self.kinds[0], batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.loss(self.kinds[1], batch).backward()
        self.update()


class MadeOnce(Gan):
    """As in torch's tutorial: the second loss goes through what was made before the first step."""

    def training_step(self, batch, batch_idx):
        real, noise = batch
        generator, critic = self.optimizers()
        made = self.generator(noise)
        self.train_on(
            critic,
            F.softplus(self.critic(made.detach())).mean() + F.softplus(-self.critic(real)).mean(),
        )
        self.train_on(generator, F.softplus(-self.critic(made)).mean())

    def train_on(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(loss.item())


CASES = {
    # its layers are small, and would be one unit but for the optimizers
    "made once": (
        MadeOnce,
        ["made", "real"],
    ),
    "made, real": (Gan, ["made", "real"]),
    "made, real twice": (Gan, ["made", "real twice"]),
    "real, made": (Gan, ["real", "made"]),
    "made, real, made": (Gan, ["made", "real", "made"]),
    "real after the step": (AfterTheStep, ["made", "real"]),
}


def _fit(rank, world_size, strategy=None):
    runs = {}
    for name, (kind, losses) in CASES.items():
        print(f"--- {name}", flush=True)
        module = kind(losses, rank, world_size)
        policy = None if kind is MadeOnce else lambda m: [m.generator, m.critic]
        fitter = trainer(strategy or zero3(unit_policy=policy), world_size)
        fitter.fit(module)
        runs[name] = module.losses, full_state(fitter)
    return runs


@pytest.fixture(scope="module")
def runs():
    return run_ranks(_fit, 2), _fit(0, 1, "auto")


@pytest.mark.parametrize("name", CASES)
def test_losses_that_run_other_units(runs, name):
    ranks, alone = runs
    losses, state = alone[name]
    mean = [sum(both) / 2 for both in zip(*(rank[name][0] for rank in ranks), strict=True)]
    assert len(losses) == STEPS * len(CASES[name][1])
    assert relative(mean, losses) <= RTOL
    assert_tensors_close(ranks[0][name][1], state)
