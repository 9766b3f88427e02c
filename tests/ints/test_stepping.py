"""What optimizers must see of the model, found out by trying them."""

import sys

import pytest
import torch
from torch import nn

from lightning_zero3.strategies.optimizers.classify import ELEMENTWISE, require_separate


class ByGlobalNorm(torch.optim.SGD):
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.grad /= norm
        return super().step(closure)


class Subclass(torch.optim.SGD):
    """Which may do anything."""


TENSORS = {torch.optim.Adafactor, torch.optim.Muon, Subclass}
REFUSED = {
    torch.optim.SparseAdam: "could not be tried",
    ByGlobalNorm: "combines several parameters",
}
OF_TORCH = {
    c for c in vars(torch.optim).values() if isinstance(c, type) and c is not torch.optim.Optimizer
}


CPU = torch.device("cpu")


def make(cls):
    return cls(nn.Linear(3, 3, bias=False).parameters(), lr=0.1)


@pytest.mark.parametrize(
    "cls", sorted((OF_TORCH | TENSORS) - REFUSED.keys(), key=lambda c: c.__name__)
)
def test_what_it_must_see(cls):
    assert (cls in ELEMENTWISE) is (cls not in TENSORS | {torch.optim.LBFGS})
    if cls in TENSORS:
        require_separate(make(cls), CPU)


class Capturable(torch.optim.Adam):
    """Works on a GPU only."""


def test_it_is_tried_on_the_device_of_the_shards(monkeypatch):
    optimizer = Capturable(nn.Linear(3, 3).parameters(), capturable=True)
    with pytest.raises(ValueError, match="could not be tried on small tensors.*capturable"):
        require_separate(optimizer, CPU)
    # As on a GPU, which torch does not look for in tensors of the host.
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"],
        "_get_capturable_supported_devices",
        lambda *args, **kwargs: ["cpu"],
    )
    require_separate(optimizer, CPU)
    torch.set_default_device("meta")  # a user's, for a large model
    try:
        require_separate(optimizer, CPU)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("cls", REFUSED)
def test_refused(cls):
    with pytest.raises(ValueError, match=REFUSED[cls]):
        require_separate(make(cls), CPU)


class Rule(torch.optim.SGD):
    """Applies a rule to each gradient before its step."""

    def __init__(self, params, lr, rule):
        super().__init__(params, lr=lr)
        self.rule = rule

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = self.rule(p, p.grad, group)
        super().step()
        return loss


class WithClosure(torch.optim.SGD):
    """Moves the weights, evaluates again, and steps from where they were; without a closure it is
    SGD.
    """

    def __init__(self, params, lr, move):
        super().__init__(params, lr=lr)
        self.move = move

    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            return super().step()
        evaluate = torch.enable_grad()(closure)
        loss, parameters = evaluate(), [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        self.move(parameters, loss)
        evaluate()
        for p, value in zip(parameters, before, strict=True):
            p.copy_(value)
        super().step()
        return loss


def sharpness_aware(parameters, loss):
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    for p in parameters:
        p += p.grad / norm


def extragradient(parameters, loss):
    for p in parameters:
        p -= p.grad


def by_loss(parameters, loss):
    for p in parameters:
        p -= p.grad * loss


def test_it_is_tried_with_closures():
    require_separate(WithClosure(nn.Linear(3, 3).parameters(), 0.1, extragradient), CPU)
    for move in (sharpness_aware, by_loss):
        with pytest.raises(ValueError, match="combines several parameters"):
            require_separate(WithClosure(nn.Linear(3, 3).parameters(), 0.1, move), CPU)


class Keeps(torch.optim.SGD):
    """Takes its rule from what it keeps on itself."""

    def __init__(self, params, lr, total_steps, **config):
        super().__init__(params, lr=lr)
        self.total_steps, self.config, self.update = total_steps, config, self.plain
        if config.get("picked"):
            self.update = self.by_norm

    def plain(self, grad):
        return grad

    def by_norm(self, grad):
        assert self.param_groups[0]["params"][0].shape != (3, 3), (
            "the method of the optimizer itself"
        )
        return grad / grad.norm()

    def step(self, closure=None):
        for p in [p for group in self.param_groups for p in group["params"]]:
            p.grad = self.by_norm(p.grad) if self.config.get("normalise") else self.update(p.grad)
        return super().step(closure)


@pytest.mark.parametrize("config", [{}, {"picked": True}, {"normalise": True}])
def test_it_is_tried_with_methods_and_dicts_that_it_keeps_and_with_required_arguments(config):
    require_separate(Keeps(nn.Linear(3, 3).parameters(), 0.1, 100, **config), CPU)


class OnlyGroups(torch.optim.Optimizer):
    """Takes groups with exactly these options, each with a rule of its own."""

    def __init__(self, groups):
        for group in groups:
            assert group.keys() == {"params", "lr", "normalise"}
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * (p.grad / p.grad.norm() if group["normalise"] else p.grad)


@pytest.mark.parametrize("normalise", [False, True])
def test_it_is_made_again_from_groups(normalise):
    groups = [
        {"params": list(nn.Linear(3, 3).parameters()), "lr": 0.1, "normalise": on}
        for on in (False, normalise)
    ]
    require_separate(OnlyGroups(groups), CPU)


class ScheduleFree(torch.optim.SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.param_groups[0]["train_mode"] = False

    def train(self):
        for group in self.param_groups:
            group["train_mode"] = True

    def step(self, closure=None):
        assert self.param_groups[0]["train_mode"], "call train() before"
        return super().step(closure)


def test_one_that_must_be_told_to_train_is_told():
    optimizer = ScheduleFree(nn.Linear(3, 3).parameters(), 0.1)
    require_separate(optimizer, CPU)
    assert not optimizer.param_groups[0]["train_mode"]


def test_a_trial_leaves_the_optimizer_alone():
    options = {"buffer": [[None, 0]], "table": {"rate": 1}}

    def count(p, grad, group):
        group["buffer"][0][1] += 1
        group["table"]["rate"] += 1
        return grad

    optimizer = Rule([{"params": nn.Linear(3, 3).parameters(), **options}], lr=0.1, rule=count)
    require_separate(optimizer, CPU)
    assert optimizer.param_groups[0]["buffer"] == [[None, 0]]
    assert optimizer.param_groups[0]["table"] == {"rate": 1}


class SkipsSpikes(torch.optim.SGD):
    """Skips a step if any gradient is large or not finite, after step ``warmup`` up to ``last``."""

    def __init__(self, params, lr, warmup=0, bound=1e4, last=1_000):
        super().__init__(params, lr=lr)
        self.warmup, self.bound, self.last, self.number = warmup, bound, last, 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.number += 1
        if not self.warmup < self.number <= self.last or all(
            grad.abs().max() < self.bound for grad in gradients
        ):
            super().step()
        return loss


class ClipsItself(SkipsSpikes):
    """Each gradient by its own norm: no rule of several parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.div_((p.grad.norm() / self.bound).clamp_min(1))
        torch.optim.SGD.step(self)
        return loss


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bound": float("inf")},
        {"last": 10},
        {"warmup": 20},
    ],
)
def test_it_is_tried_with_gradients_that_are_large_or_not_finite(options):
    with pytest.raises(
        ValueError,
        match="combines several parameters.*skips when any gradient is large or not finite",
    ):
        require_separate(SkipsSpikes(nn.Linear(3, 3).parameters(), 0.1, **options), CPU)
    require_separate(ClipsItself(nn.Linear(3, 3).parameters(), 0.1, **options), CPU)
