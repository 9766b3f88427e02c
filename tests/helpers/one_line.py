"""A module whose training step is one line to try, and its run."""

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from . import recorded
from .parity import trainer


class Small(pl.LightningModule):
    """A line of a training step to try."""

    def __init__(self, line, batches=None):
        super().__init__()
        self.line, self.batches = line, batches
        self.layer = nn.Linear(3, 3)
        self.metric = MeanMetric()
        self.temperature, self.history, self.last, self.counts = 1.0, [], None, {"steps": 0}
        self.generator = np.random.default_rng(0)
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch if isinstance(batch, torch.Tensor) else batch["x"]).square().mean()
        return self.line(self, batch, batch_idx, loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        torch.manual_seed(0)
        return DataLoader(self.batches or list(torch.randn(6, 4, 3)), batch_size=None)


def train(module, *callbacks, **options):
    fitter = trainer(callbacks=list(callbacks), accelerator=recorded.DEVICE, **options)
    torch.manual_seed(1)
    module.layer.reset_parameters()
    fitter.fit(module)
    return fitter
