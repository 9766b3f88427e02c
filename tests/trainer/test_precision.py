"""Every precision: two ranks end where one process ends, bit by bit.

One rank's loss counts twice and the other's not at all, so that the mean of their gradients is
exact whatever it is rounded to, and differs from either.
"""

from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from helpers.parity import RTOL, assert_tensors_close, full_state, trainer, zero3
from helpers.ranks import run_ranks
from helpers.tracking import needs_cuda
from lightning_zero3.strategies.collectives import ComparedCollectives, GroupCollectives

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
        # Powers of two: whether a product is rounded before it is added depends on an element's
        # place in memory.
        return torch.optim.SGD(self.parameters(), lr=0.125, momentum=0.5, weight_decay=0.0625)

    def train_dataloader(self):
        return DataLoader(
            list(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))), batch_size=None
        )


def fit(rank, world_size, sharded, accelerator):
    found = {}
    if accelerator == "gpu":
        torch.distributed.destroy_process_group()  # gloo's
    for precision in DTYPES:
        strategy = zero3(unit_policy=[nn.Linear]) if sharded else "auto"
        fitter = trainer(strategy, world_size, precision=precision, accelerator=accelerator)
        fitter.fit(module := Model())
        state = {name: value.to("cpu", copy=True) for name, value in full_state(fitter).items()}
        found[precision] = [loss.cpu() for loss in module.losses], state
    return found


@cache
def results(world_size, sharded, accelerator="cpu"):
    return run_ranks(fit, world_size, sharded, accelerator, timeout=100)


def check(everyone, expected, precision):
    for losses, _ in everyone:
        assert (
            torch.equal(torch.stack(losses), torch.stack(expected[0])) and losses[0] != losses[-1]
        )
    state = everyone[0][1]
    assert state.keys() == expected[1].keys()
    for name, value in state.items():
        assert value.dtype == expected[1][name].dtype == DTYPES[precision]
        assert torch.equal(value, expected[1][name]), name


@pytest.mark.parametrize("precision", DTYPES)
def test_two_ranks_are_one_process(precision):
    (expected,) = results(1, sharded=False)
    check([found[precision] for found in results(2, sharded=True)], expected[precision], precision)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("precision", DTYPES)
def test_one_gpu(precision):
    (expected,), found = (
        results(1, sharded=False, accelerator="gpu"),
        results(1, sharded=True, accelerator="gpu"),
    )
    check([found[0][precision]], expected[precision], precision)


# ---- sums of low precision -------------------------------------------------------------------

# Precision -> the gradient of rank 0, of which the dtype's step is 2, so that a sum in it would
# lose the others' ones.
SUMMANDS = {"bf16-true": 256.0, "16-true": 2048.0}
COMMUNICATORS = {"shared": None, "messages": ComparedCollectives, "group": GroupCollectives}


class Summed(pl.LightningModule):
    """Its gradient is 1 in every element, and a large number on rank 0."""

    def __init__(self, first):
        super().__init__()
        self.net, self.first = nn.Linear(8, 4, bias=False), first
        nn.init.zeros_(self.net.weight)

    def training_step(self, batch, batch_idx):
        return self.net.weight.sum() * (1.0 if self.global_rank else self.first)

    def on_before_optimizer_step(self, optimizer):
        self.gradient = self.net.weight.grad.clone()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def train_dataloader(self):
        return DataLoader(torch.zeros(1))


def fit_summed(rank, world_size):
    found = {}
    for communicator, kind in COMMUNICATORS.items():
        for precision, first in SUMMANDS.items():
            with pytest.MonkeyPatch.context() as patch:
                if kind is not None:
                    patch.setattr(
                        "lightning_zero3.strategies.zero3.make_collectives",
                        lambda group, device, kind=kind: kind(group),
                    )
                fitter = trainer(zero3(unit_policy=None), world_size, precision=precision)
                fitter.fit(module := Summed(first))
            found[communicator, precision] = module.gradient, full_state(fitter).get("net.weight")
    return found


def test_gradients_are_summed_in_fp32():
    ranks = run_ranks(fit_summed, 4, timeout=60)
    for rank, found in enumerate(ranks):
        for (communicator, precision), (gradient, weight) in found.items():
            exact = torch.tensor((SUMMANDS[precision] + 3) / 4)
            expected = exact.to(DTYPES[precision])
            assert expected != SUMMANDS[precision] / 4, "the ones must show in the mean"
            assert gradient.dtype == expected.dtype and torch.equal(
                gradient, expected.expand(4, 8)
            ), (communicator, precision)
            if rank == 0:
                assert torch.equal(weight, -expected.expand(4, 8)), (communicator, precision)


# ---- 16-mixed --------------------------------------------------------------------------------

SCALED = {  # options of the Trainer; the scale grows after two steps
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped by value": {"gradient_clip_val": 2.0**-6, "gradient_clip_algorithm": "value"},
    "accumulated, clipped by value": {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 2.0**-6,
        "gradient_clip_algorithm": "value",
    },
    # A norm is added up in another order: one step, for what differs by rounding is not to be
    # rounded to fp16 again.
    "accumulated, clipped by norm": {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.05,
        "max_steps": 1,
    },
}


class Scaled(Model):
    def __init__(self):
        super().__init__()
        self.scales, self.gradients, self.norms = [], [], []

    def on_before_optimizer_step(self, optimizer):
        """The scaler's factor is out, and nothing is clipped yet."""
        if self.trainer.world_size > 1:
            norm = self.trainer.strategy.gradient_norm()
        else:
            norm = get_total_norm([p.grad for p in self.parameters()])
        self.norms.append(norm)

    def configure_gradient_clipping(self, optimizer, *args, **kwargs):
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.gradients.append({name: p.grad.clone() for name, p in self.named_parameters()})

    def on_train_batch_end(self, *args):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def fit_scaled(rank, world_size):
    found = {}
    for name, options in SCALED.items():
        strategy = "auto" if world_size == 1 else zero3(unit_policy=[nn.Linear])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        fitter = trainer(strategy, world_size, plugins=[plugin], max_epochs=2, **options)
        fitter.fit(module := Scaled())
        found[name] = (
            module.losses,
            module.scales,
            module.gradients,
            module.norms,
            {k: v.clone() for k, v in full_state(fitter).items()},
        )
    return found


def test_16_mixed_is_one_process():
    (alone,), (first, second) = (
        run_ranks(fit_scaled, 1, timeout=60),
        run_ranks(fit_scaled, 2, timeout=60),
    )
    for name in SCALED:
        losses, scales, gradients, norms, state = first[name]
        assert scales == second[name][1] == alone[name][1] and len(set(scales)) > (
            "norm" not in name
        ), name
        assert_tensors_close(second[name][2], gradients, rtol=0.0)
        rtol = RTOL if "norm" in name else 0.0
        assert_tensors_close(losses, alone[name][0], 0.0, f"{name}: losses")
        assert_tensors_close(gradients, alone[name][2], rtol, f"{name}: gradients")
        assert_tensors_close(norms, alone[name][3], RTOL, f"{name}: norms")
        assert_tensors_close(second[name][3], norms, 0.0, f"{name}: norms")
        assert_tensors_close(state, alone[name][4], rtol, f"{name}: state")
    for name in ("accumulated", "clipped by value", "accumulated, clipped by norm"):
        assert (
            alone[name][2][0]["net.0.weight"] - alone["plain"][2][0]["net.0.weight"]
        ).abs().max() > 1e-4, name


class OfEachRank(Model):
    """Every rank has a batch of its own, and its gradients count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.losses.append(loss.detach())
        return loss

    def train_dataloader(self):
        whole = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(1))
        return DataLoader([x.chunk(2)[self.trainer.global_rank] for x in whole], batch_size=None)


def fit_of_each_rank(rank, world_size, sharded):
    strategy = zero3(unit_policy=[nn.Linear]) if sharded else "ddp"
    plugin = MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    )
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2}
    fitter = trainer(strategy, world_size, plugins=[plugin], **options)
    fitter.fit(module := OfEachRank())
    return module.losses, {k: v.clone() for k, v in full_state(fitter).items()}


def test_16_mixed_of_each_ranks_own_batches_is_ddp():
    mine, ddp = (
        run_ranks(fit_of_each_rank, 2, True, timeout=60),
        run_ranks(fit_of_each_rank, 2, False, timeout=60),
    )
    assert not torch.equal(mine[0][0][0], mine[1][0][0])
    for rank in range(2):
        assert_tensors_close(mine[rank][0], ddp[rank][0], 1e-6, "losses")
    assert_tensors_close(mine[0][1], ddp[0][1], 2e-6, "state")


# ---- what has no meaning ---------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_keep_in_fp32_of_a_model_that_has_no_fp32_is_an_error(precision):
    with pytest.raises(
        ValueError,
        match=rf"keep_in_fp32=\['net.2'\]\) with precision='{precision}'.*Use 'bf16-mixed'",
    ):
        trainer(zero3(unit_policy=None, keep_in_fp32=["net.2"]), 1, precision=precision).fit(
            Model()
        )
