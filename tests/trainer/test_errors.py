"""Bad input gets an error that says what is wrong, on every rank, before the first training
step.
"""

from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.utils.data import DataLoader

from helpers.models import TinyLm, make, part, tokens
from helpers.parity import full_state, trainer, zero3
from helpers.ranks import run_ranks

RANKS = 2


class Model(pl.LightningModule):
    """Right in every way; cases spoil one thing."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.net = self.build()
        self.trained = 0

    def build(self):
        return make(TinyLm)

    def training_step(self, batch, batch_idx):
        self.trained += 1
        return self.net.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader([part(b, self.rank, RANKS) for b in tokens(2)], batch_size=None)


class ForeignParameter(Model):
    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(3, 2))], lr=0.1)


class CopiedParameters(Model):
    def configure_optimizers(self):
        return torch.optim.SGD(
            [nn.Parameter(p.detach().clone()) for p in self.parameters()], lr=0.1
        )


class OtherShape(Model):
    def build(self):
        return make(lambda: TinyLm(depth=2 + self.rank))


class OtherTrained(Model):
    def build(self):
        net = make(TinyLm)
        net.norm.requires_grad_(self.rank == 0)
        return net

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class OtherBuffers(Model):
    def build(self):
        net = make(TinyLm)
        net.register_buffer("table", torch.ones(2 + self.rank))
        return net


class OtherFrozen(Model):
    build = OtherTrained.build


class OtherGroups(Model):
    def configure_optimizers(self):
        names = ["norm", "head"][self.rank]
        inside = [p for n, p in self.named_parameters() if names in n]
        outside = [p for n, p in self.named_parameters() if names not in n]
        return torch.optim.SGD([{"params": inside}, {"params": outside, "lr": 0.2}], lr=0.1)


class AddedAfterSetUp(Model):
    def on_train_start(self):
        self.net.late = nn.Linear(3, 3)


class GlobalNormSgd(torch.optim.SGD):
    """What it does to a parameter depends on the others."""

    def step(self, closure=None):
        loss = None if closure is None else closure()
        parameters = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.grad.div_(norm)
        super().step()
        return loss


class Slowed(torch.optim.Optimizer):
    """Made of another one, as Lookahead is."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)


class ByAWrapper(Model):
    def configure_optimizers(self):
        return Slowed(torch.optim.SGD(self.parameters(), lr=0.1))


class ByGlobalNorm(Model):
    def configure_optimizers(self):
        return GlobalNormSgd(self.parameters(), lr=0.1)


class BySparseAdam(Model):
    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.parameters())


class ByNothing(Model):
    def configure_optimizers(self):
        class Useless(torch.optim.SGD):
            def step(self, closure=None, *, needed):
                pass

        return Useless(self.parameters(), lr=0.1)


class OwnPrecision(Precision):
    precision = "own-precision"


# name -> module, options of the strategy, options of the Trainer, what the message says
CASES = {
    "foreign parameter": (
        ForeignParameter,
        {},
        {},
        ["SGD holds a tensor of shape (3, 2)", "not a parameter of ForeignParameter"],
    ),
    "copied parameters": (
        CopiedParameters,
        {},
        {},
        ["SGD holds a tensor", "not a parameter of"],
    ),
    "unknown class": (
        Model,
        {"unit_policy": ["Blokc"]},
        {},
        ["unit_policy names 'Blokc', but the model has no module of that class"],
    ),
    "precision": (
        Model,
        {},
        {"plugins": [OwnPrecision()]},
        ["does not support the precision plugin OwnPrecision ('own-precision')"],
    ),
    "other shape": (
        OtherShape,
        {},
        {},
        ["The ranks have different models", "rank 0 has [", "rank 1 has [net.blocks.2"],
    ),
    "other trained": (
        OtherTrained,
        {},
        {},
        ["The ranks have different models", "net.norm.weight", "not trained"],
    ),
    "other buffers": (
        OtherBuffers,
        {},
        {},
        ["different models", "net.table: shape (2,)", "net.table: shape (3,)"],
    ),
    "other frozen": (
        OtherFrozen,
        {},
        {},
        ["The ranks have different models", "net.norm.weight", "requires_grad False"],
    ),
    "other groups": (OtherGroups, {}, {}, ["The ranks have different models"]),
    "added after set-up": (AddedAfterSetUp, {}, {}, ["net.late.weight", "after"]),
    "global norm": (
        ByGlobalNorm,
        {},
        {},
        ["GlobalNormSgd combines several parameters", "or another strategy"],
    ),
    "SparseAdam": (
        BySparseAdam,
        {},
        {},
        ["SparseAdam could not be tried", "does not support dense gradients"],
    ),
    "wrapper": (
        ByAWrapper,
        {},
        {},
        ["Slowed could not be tried on small tensors", "If it wraps another optimizer, return"],
    ),
    "untried optimizer": (
        ByNothing,
        {},
        {},
        ["Useless could not be tried on small tensors", "'needed'"],
    ),
}


def _fit(rank, name):
    kind, strategy, options, _ = CASES[name]
    module = kind(rank)
    try:
        trainer(zero3(**strategy), RANKS, **options).fit(module)
    except Exception as error:
        return type(error).__name__, str(error), module.trained
    return "nothing", "it trained", module.trained


def fit_all(rank, world_size):
    results = {}
    for name in CASES:
        print("---", name, flush=True)
        results[name] = _fit(rank, name)
    return results


@cache
def results():
    return run_ranks(fit_all, RANKS, timeout=60)


@pytest.mark.parametrize("name", CASES)
def test_refused_on_both_ranks(name):
    for rank in range(RANKS):
        kind, message, trained = results()[rank][name]
        assert trained == 0, "an error after training began"
        assert kind in ("ValueError", "TypeError", "ResidencyError"), f"{kind}: {message}"
        for wanted in CASES[name][3]:
            assert wanted in message


class PlainSgd(torch.optim.SGD):
    """Its step wants ordinary tensors, as compiled ones do."""

    steps = 0

    def step(self, closure=None):
        if closure is not None:
            closure()
        assert all(type(p.grad) is torch.Tensor for p in self.param_groups[0]["params"])
        assert all(type(p) is torch.nn.Parameter for p in self.param_groups[0]["params"])
        self.steps += 1
        return super().step()


class LooksAtNorms(Model):
    def training_step(self, batch, batch_idx):
        resting = next(self.net.blocks.parameters())
        assert resting.expand_as(other=torch.empty(2, *resting.shape)).shape == (2, *resting.shape)
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer):
        held = optimizer.param_groups[0]["params"]
        assert [id(p) for p in held] == [id(p) for p in self.parameters()]
        for p in held:
            assert p.grad.norm() == p.grad.clone().norm() and p.grad.shape == p.shape

    def configure_optimizers(self):
        self.optimizer = PlainSgd(self.parameters(), lr=0.1)
        return self.optimizer


def fit_right(rank, world_size):
    found = []
    for window in (1, 2):
        module = LooksAtNorms(rank)
        trainer(zero3(), RANKS, accumulate_grad_batches=window).fit(module)
        found.append((module.trained, module.optimizer.steps))
    return found


def test_param_groups_hold_the_modules_parameters_and_in_steps_plain_tensors():
    assert run_ranks(fit_right, RANKS, timeout=60) == [[(2, 2), (2, 1)]] * RANKS


class WithoutParameters(Model):
    def build(self):
        return nn.ReLU()


def evaluate_without_parameters(rank, world_size):
    module = WithoutParameters(rank)
    batches = DataLoader(torch.arange(4.0), batch_size=1)
    module.validation_step = lambda batch: module.log("v", batch.mean(), sync_dist=True)
    options = {"limit_val_batches": 1.0, "use_distributed_sampler": True}
    return trainer(zero3(unit_policy=None), RANKS, **options).validate(module, batches)


def test_a_module_without_parameters_is_evaluated():
    assert run_ranks(evaluate_without_parameters, RANKS, timeout=30) == [[{"v": 1.5}]] * RANKS


class KeepsItsOptimizer(Model):
    def configure_optimizers(self):
        if not hasattr(self, "kept"):
            self.kept = [torch.optim.Adam(self.parameters(), lr=0.01)]
        return self.kept[0]


def fit_twice(rank, world_size):
    found = []
    for strategy in ("ddp", "zero3"):
        module = KeepsItsOptimizer(rank)
        for _ in range(2):
            fitted = trainer(strategy, RANKS)
            fitted.fit(module)
        found.append(full_state(fitted))
    return found


def test_an_optimizer_of_an_earlier_run_goes_on():
    expected, found = run_ranks(fit_twice, RANKS, timeout=30)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
