"""A small model, a logger that keeps what it gets, and a run: what the tests of the memory tracker
share.
"""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import RandomDataset
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader

MIB = 2**20
WIDTH = 512
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
# a device to try, besides "cpu"
on_cuda = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])


class Model(LightningModule):
    def __init__(self, layers=6):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.register_buffer("table", torch.ones(WIDTH, WIDTH))

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch).relu()
        return batch.pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Collecting(Logger):
    """A logger of one's own: what it gets is what every logger gets."""

    def __init__(self):
        super().__init__()
        self.rows = []

    name = version = "collecting"

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def memory(self):
        return [
            (step, metrics)
            for step, metrics in self.rows
            if any(name.startswith("memory/") for name in metrics)
        ]


def fit(*callbacks, tmp_path, model=None, **options):
    logger = Collecting()
    options = {
        "max_steps": 6,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "limit_val_batches": 0,
        **options,
    }
    trainer = Trainer(
        callbacks=list(callbacks),
        logger=logger,
        log_every_n_steps=2,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **{"enable_checkpointing": False, **options},
    )
    loader = DataLoader(RandomDataset(WIDTH, 64), batch_size=4)
    trainer.fit(model or Model(), loader, loader)
    return trainer, logger
