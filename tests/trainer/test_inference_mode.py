"""Evaluation under `inference_mode`, which Lightning chooses outside of `fit` but for gloo, before
training and after it.
"""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loops import utilities
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils.data import DataLoader

from helpers.parity import assert_tensors_close, full_state, trainer, zero3
from helpers.ranks import run_ranks

# the same on all ranks
BATCHES = [torch.randn(4, 6, generator=torch.Generator().manual_seed(k)) for k in range(4)]


class Watched(pl.LightningModule):
    """Looks at itself and changes itself at the end of an evaluation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)
        )
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("table", torch.zeros(4, 6))
        self.seen, self.kept = [], None

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - self.last).square().mean()
        self.seen.append(loss.item())
        self.last.lerp_(loss.detach(), 0.5)
        if self.kept is not None:  # a gradient that the evaluation before this has read
            self.kept.mul_(2)
        return loss

    def validation_step(self, batch, batch_idx):
        assert torch.is_inference_mode_enabled() or self.trainer.state.fn == TrainerFn.FITTING
        self.table = self.table + batch
        loss = self.net(batch).square().mean()
        self.log("loss", loss, sync_dist=True)
        self.seen.append(loss.item())

    @torch.inference_mode()
    def on_validation_epoch_end(self):
        first, last = self.net[0], self.net[-1]
        gathered = getattr(self.trainer.strategy, "gathered", None)
        self.kept = first.weight.grad
        if self.kept is not None:
            self.seen.append(self.kept.sum().item())
            last.weight.grad.mul_(2)
        if gathered is None:
            self._change(first)
        else:
            with gathered(first, modify=True):
                self._change(first)
            self.trainer.strategy.full_state_dict()

    def _change(self, layer):
        self.seen.append(layer.weight.sum().item())
        layer.weight.mul_(0.9)

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    def predict_step(self, batch, batch_idx):
        return self.net(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, eps=1e-2)


def evaluate(rank, world_size, strategy, folder, options):
    """All stages in one trainer: what was seen, predicted, and is left."""
    utilities._distributed_is_initialized = lambda: False  # gloo's own way is `no_grad`
    module, loader = Watched(), DataLoader(BATCHES, batch_size=None)
    sharded = {"reduce_once": True, "unit_policy": ["Linear"]} if strategy == "zero3" else {}
    runner = trainer(
        zero3(**sharded) if sharded else strategy,
        world_size,
        max_epochs=2,
        num_sanity_val_steps=2,
        limit_val_batches=2,
        enable_checkpointing=True,
        callbacks=[
            EMAWeightAveraging(decay=0.8),
            ModelCheckpoint(folder / strategy, save_top_k=-1, save_last=True),
        ],
        **options,
    )
    runner.validate(module, loader)
    runner.fit(module, loader, loader)
    runner.test(module, loader)
    predicted = runner.predict(module, loader)
    state = {name: value.clone() for name, value in full_state(runner).items()}
    return module.seen, predicted, state


OPTIONS = {
    "each epoch": {},
    "within gradients that are held": {"val_check_interval": 1, "accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_as_one_process(options, tmp_path):
    (expected,) = run_ranks(evaluate, 1, "auto", tmp_path, OPTIONS[options])
    for found in run_ranks(evaluate, 2, "zero3", tmp_path, OPTIONS[options]):
        assert len(found[0]) == len(expected[0]) > 20
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
        assert_tensors_close(found[1], expected[1], rtol=2e-5)
        assert not found[2] or assert_tensors_close(found[2], expected[2], rtol=2e-5) is not None
