"""Gradients that will be cleared take no memory in the next forward; hooks that may read them still
can, as with ddp.
"""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from helpers.parity import RTOL, trainer
from helpers.ranks import run_ranks
from lightning_zero3 import ResidencyError
from lightning_zero3.strategies.engine import partition

READERS = ("nobody", "on_before_zero_grad", "callback", "on_train_batch_end", "training_step")


class Reader(pl.LightningModule):
    """Reads a gradient of the step before in one place, and notes what memory gradients take inside
    of `training_step`.
    """

    def __init__(self, reads):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        )
        self.reads, self.found, self.nbytes, self.losses = reads, [], [], []

    def look(self, place):
        if place == self.reads and self.trainer.global_step:
            if place == "training_step" and hasattr(self.trainer.strategy, "gradient_norm"):
                with pytest.raises(ResidencyError, match="freed when `training_step` began"):
                    self.trainer.strategy.gradient_norm()
            grad = self.net[0].weight.grad
            self.found.append(grad.clone())

    def training_step(self, batch):
        self.look("training_step")
        if hasattr(self.trainer.strategy, "memory_ledger"):
            assert len(self.trainer.strategy.engine.units) == 4
            self.nbytes.append(self.trainer.strategy.memory_ledger()["gradients"])
        return self.net(batch).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx % 2:  # ddp's are a rank's own until a window is complete
            self.look("on_train_batch_end")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        data = torch.randn(16, 8, generator=torch.Generator().manual_seed(self.trainer.global_rank))
        return torch.utils.data.DataLoader(data, batch_size=4)


class InHook(Reader):
    def on_before_zero_grad(self, optimizer):
        self.look("on_before_zero_grad")


class Adversarial(Reader):
    """A backward of its own inside of `training_step`, as of attacks on the input."""

    def training_step(self, batch):
        x = batch.clone().requires_grad_()
        self.zero_grad()
        self.net(x).square().mean().backward()
        self.found.append(self.net[0].weight.grad.clone())
        self.zero_grad()
        loss = super().training_step(batch + 0.1 * x.grad.sign())
        self.losses.append(loss.detach())
        return loss


class InCallback(pl.Callback):
    def on_before_zero_grad(self, trainer, module, optimizer):
        module.look("callback")


def _fit(rank, world_size):
    partition.SMALL_NUMEL = 0  # every layer is a unit of its own
    runs = {}
    for strategy in ("ddp", "zero3"):
        for reads in READERS:
            module = (InHook if reads == "on_before_zero_grad" else Reader)(reads)
            callbacks = [InCallback()] if reads == "callback" else []
            error = None
            try:
                trainer(strategy, world_size, callbacks=callbacks, accumulate_grad_batches=2).fit(
                    module
                )
            except RuntimeError as raised:
                error = str(raised)
            runs[strategy, reads] = module.found, module.nbytes, error
        module = Adversarial("nowhere")
        trainer(strategy, world_size).fit(module)
        runs[strategy] = module.found, module.losses
    return runs


def _assert_close(mine, theirs):
    torch.testing.assert_close(mine, theirs, rtol=0, atol=RTOL * float(theirs.abs().max()))


def test_freed_unless_a_hook_can_look():
    ranks = run_ranks(_fit, 2)
    for runs in ranks:
        for reads in READERS[:-1]:
            (expected, _, _), (found, nbytes, error) = runs["ddp", reads], runs["zero3", reads]
            assert error is None
            assert len(found) == {"nobody": 0, "on_train_batch_end": 2}.get(reads, 1)
            for mine, theirs in zip(found, expected, strict=True):
                _assert_close(mine, theirs)
            kept = reads in ("on_before_zero_grad", "callback")
            # Windows of two micro-batches: there are gradients to add to in the second ones, and in
            # the third old ones.
            assert [n > 0 for n in nbytes] == [False, True, kept, True], reads
        assert runs["ddp", "training_step"][2] is None
        error = runs["zero3", "training_step"][2]
        assert "'net.0.weight' was freed when `training_step` began" in error
        assert "`on_train_batch_end`" in error
        (found, losses), (_, expected) = runs["zero3"], runs["ddp"]
        assert len(losses) == 4
        _assert_close(torch.stack(losses), torch.stack(expected))
        # In a step ddp's gradients are a rank's own.
        _assert_close(
            torch.stack(found), torch.stack([torch.stack(r["ddp"][0]) for r in ranks]).mean(0)
        )
