"""16-mixed: an infinity in one rank's shard makes all ranks skip the step; gradients are read as
they are.
"""

from contextlib import nullcontext
from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from helpers.tracking import needs_cuda

SCALE, OVERFLOWS = 2.0**16, 1  # the step that overflows


class Model(pl.LightningModule):
    overflows = (OVERFLOWS,)

    def __init__(self, fused, frequency=1):
        super().__init__()
        self.fused, self.frequency = fused, frequency
        torch.manual_seed(0)
        self.net = nn.Linear(8, 8)
        self.rates, self.scales, self.weights, self.unscaled = [], [], [], []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).float().square().mean()
        if self.trainer.fit_loop.total_batch_idx in self.overflows:
            # times the scale it is infinite; rank 0 owns this element alone
            loss = loss + 1e36 * self.net.weight[0, 0]
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def on_after_backward(self):
        self.scaled = self.net.weight.grad.clone()
        step = self.trainer.strategy.engine.steps[self.trainer.optimizers[0]]
        grads = step.parts_of_gradients()
        self.infinite = any(bool(torch.isinf(grad).any()) for grad in grads)
        if self.infinite:
            self.found_at = len(self.rates) - 1

    def on_before_optimizer_step(self, optimizer):
        self.unscaled.append((self.scaled.norm() / self.net.weight.grad.norm()).item())

    def on_train_batch_end(self, *args):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        with self.trainer.strategy.gathered(self):
            self.weights.append(self.net.weight.detach().clone())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, fused=self.fused)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        config = {"scheduler": scheduler, "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def train_dataloader(self):
        return DataLoader(
            list(torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(1))), batch_size=None
        )


def fit(rank, world_size, accelerator="cpu"):
    if accelerator == "gpu":
        torch.distributed.destroy_process_group()  # gloo's
    found, device = [], {"cpu": "cpu", "gpu": "cuda"}[accelerator]
    for fused in (False, True):
        module = Model(fused)
        plugin = MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=SCALE))
        trainer(zero3(unit_policy=None), world_size, plugins=[plugin], accelerator=accelerator).fit(
            module
        )
        weights = [weight.cpu() for weight in module.weights]
        found.append(
            (
                module.rates,
                module.scales,
                weights,
                module.unscaled,
                getattr(module, "found_at", None),
            )
        )
    return found


def test_all_ranks_skip_a_step_that_overflows_on_one():
    plain, fused = zip(*run_ranks(fit, 2, timeout=60), strict=True)
    check(plain)
    check(fused)


class Alone(Model):
    """In one process: what schedulers do is Lightning's."""

    def on_after_backward(self):
        pass

    on_before_optimizer_step = on_train_batch_end = lambda self, *args: None


@cache
def rates_of_one_process():
    module = Alone(False)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE))
    trainer("auto", 1, plugins=[plugin]).fit(module)
    return module.rates


class Held(pl.LightningModule):
    """Has gradients from before they are unscaled, and uses them after; in float64, which autocast
    leaves alone.
    """

    def __init__(self, how, parts):
        super().__init__()
        self.how, self.parts, self.norms = how, parts, []
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()

    def training_step(self, batch, batch_idx):
        mine = batch if self.trainer.world_size == 1 else batch.chunk(self.parts)[self.global_rank]
        return self.net(mine.double()).square().mean()

    def on_after_backward(self):
        if self.how == "assigned":
            for p in self.parameters():
                p.grad = p.grad * 2
        self.kept = [p.grad.view(-1) if self.how == "views" else p.grad for p in self.parameters()]
        if self.how == "assigned, not kept":
            del self.kept
            for p in self.parameters():
                p.grad = p.grad * 2

    def on_before_optimizer_step(self, optimizer):
        grads = getattr(self, "kept", None) or [p.grad for p in self.parameters()]
        self.norms.append(sum(grad.norm().item() for grad in grads))
        for grad in grads:
            grad.mul_(0.5)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(
            list(torch.randn(4, 2 * self.parts, 8, generator=torch.Generator().manual_seed(1))),
            batch_size=None,
        )


WAYS = ["read", "views", "assigned", "assigned, not kept"]


def fit_held(rank, world_size, parts, strategy="zero3"):
    found = {}
    for how in WAYS:
        module, plugin = (
            Held(how, parts),
            MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=SCALE)),
        )
        fitter = trainer(strategy, world_size, plugins=[plugin])
        fitter.fit(module)
        with fitter.strategy.gathered(module) if strategy == "zero3" else nullcontext():
            found[how] = module.norms, [p.detach().clone() for p in module.parameters()]
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_users_hold_are_unscaled_too(world_size):
    """torch does not count what a scaler does to them."""
    expected = fit_held(0, 1, world_size, "auto")  # of the batches of all ranks
    for found in run_ranks(fit_held, world_size, world_size, timeout=60):
        for how in WAYS:
            torch.testing.assert_close(found[how], expected[how], rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@needs_cuda
def test_one_gpu_skips():
    for run in run_ranks(fit, 1, "gpu", timeout=100)[0]:
        check([run], [OVERFLOWS])


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_skip_alike():
    plain, fused = zip(*run_ranks(fit, 2, "gpu", timeout=100), strict=True)
    check(plain)
    check(fused)


def check(everyone, found_at=(OVERFLOWS, None)):
    assert [found for *_, found in everyone] == list(found_at), "only one rank can see the infinity"
    for rates, scales, weights, unscaled, _ in everyone:
        assert [unscaled[step] for step in (0, 2, 3)] == [SCALE, SCALE / 2, SCALE / 2]
        assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
        assert rates == rates_of_one_process() and len(set(rates)) == 4
        assert torch.equal(weights[OVERFLOWS], weights[OVERFLOWS - 1])
        assert not torch.equal(weights[OVERFLOWS + 1], weights[OVERFLOWS])
        assert all(
            torch.equal(mine, first) for mine, first in zip(weights, everyone[0][2], strict=True)
        )
