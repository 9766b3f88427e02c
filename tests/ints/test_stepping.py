"""What optimizers must see of the model, found out by trying them."""

import sys

import pytest
import torch
from torch import nn

from lightning_zero3.strategies.optimizers import Stepping, stepping


class InBlocks(torch.optim.SGD):
    """Rounds large gradients in blocks, as optimizers with 8-bit state do; small ones not at all."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.numel() > 4096:
                    blocks = p.grad.flatten().split(256)
                    p.grad = torch.cat([(b / b.abs().max() * 127).round() for b in blocks]).view_as(p)
        return super().step(closure)


class ByGlobalNorm(torch.optim.SGD):
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.grad /= norm
        return super().step(closure)


class ByOption(torch.optim.SGD):
    """Divides by the norm where its group says so, from a step on that its group names."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"] if group.get("trust") and group["steps"] > group.get("start", 0) else ():
                p.grad = p.grad / p.grad.norm()
        return super().step(closure)


class ByAngle(torch.optim.SGD):
    """Treats matrices otherwise where their gradient is almost orthogonal to them, which numbers at random never are."""

    def project(self, p):
        return len(p.shape) > 1 and (p * p.grad).sum().abs() < 1e-6 * p.norm() * p.grad.norm()

    def step(self, closure=None):
        for p in [p for group in self.param_groups for p in group["params"]]:
            if self.project(p):
                p.grad = p.grad / p.grad.norm()
        return super().step(closure)


class ByAngleOfData(ByAngle):
    def project(self, p):
        return p.grad.data.abs().dim() > 1 and super().project(p)


class OfItsShape(torch.optim.SGD):
    """Asks for the shape to make a tensor, which is elementwise."""

    def step(self, closure=None):
        for p in [p for group in self.param_groups for p in group["params"]]:
            p.grad = p.grad + torch.zeros(p.shape) + torch.zeros_like(p).view(p.size())
        return super().step(closure)


TENSORS = {torch.optim.Adafactor, torch.optim.Muon, InBlocks, ByAngle, ByAngleOfData}
REFUSED = {torch.optim.SparseAdam: "could not be tried", ByGlobalNorm: "combines several parameters"}
OF_TORCH = {c for c in vars(torch.optim).values() if isinstance(c, type) and c is not torch.optim.Optimizer}


CPU = torch.device("cpu")


def make(cls):
    return cls(nn.Linear(3, 3, bias=False).parameters(), lr=0.1)


@pytest.mark.parametrize("cls", sorted((OF_TORCH | TENSORS | {OfItsShape}) - REFUSED.keys(), key=lambda c: c.__name__))
def test_what_it_must_see(cls):
    expected = Stepping.MODEL if cls is torch.optim.LBFGS else Stepping.TENSORS if cls in TENSORS else Stepping.ELEMENTS
    assert stepping(make(cls), CPU) is expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Stepping.ELEMENTS),
        ({"trust": True}, Stepping.TENSORS),
        ({"trust": True, "start": 25}, Stepping.TENSORS),
        ({"trust": False, "start": 25}, Stepping.ELEMENTS),
    ],
)
def test_it_is_tried_with_the_options_of_its_groups_and_past_their_steps(options, expected):
    layers = [nn.Linear(3, 3) for _ in range(2)]
    groups = [{"params": layers[0].parameters()}, {"params": layers[1].parameters(), **options}]
    assert stepping(ByOption(groups, lr=0.1), CPU) is expected


@pytest.mark.parametrize("lr", [0.0, 1e-9, 1e-6, torch.tensor(1e-6)])
def test_a_warm_up_from_next_to_nothing_shows_nothing_at_first(lr):
    assert stepping(torch.optim.Adam(nn.Linear(3, 3).parameters(), lr=lr, foreach=False), CPU) is Stepping.ELEMENTS
    assert stepping(ByOption([{"params": nn.Linear(3, 3).parameters(), "trust": True}], lr=lr), CPU) is Stepping.TENSORS


class ByAttribute(torch.optim.SGD):
    """Divides by what a function says, from a step on; keeps all that on itself."""

    def __init__(self, params, lr=0.1, start=0, rule=None):
        super().__init__(params, lr=lr)
        self.start, self.rule, self.steps = start, rule, 0

    def count(self):
        self.steps += 1

    def step(self, closure=None):
        self.count()
        for p in [p for group in self.param_groups for p in group["params"]]:
            if self.rule is not None and self.steps > self.start:
                p.grad = p.grad / self.rule(p.grad)
        return super().step(closure)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Stepping.ELEMENTS),
        ({"rule": lambda grad: grad.norm()}, Stepping.TENSORS),
        ({"rule": lambda grad: grad.norm(), "start": 25}, Stepping.TENSORS),
        ({"rule": lambda grad: 2.0}, Stepping.ELEMENTS),
    ],
)
def test_it_is_tried_with_what_it_keeps_on_itself(options, expected):
    optimizer = ByAttribute(nn.Linear(3, 3).parameters())
    for name, value in options.items():
        setattr(optimizer, name, value)
    optimizer.count = lambda: pytest.fail("the trial counted the steps of the optimizer itself")
    assert stepping(optimizer, CPU) is expected


@pytest.mark.parametrize("cls", REFUSED)
def test_refused(cls):
    with pytest.raises(ValueError, match=REFUSED[cls]):
        stepping(make(cls), CPU)


def test_it_is_tried_on_the_device_of_the_shards(monkeypatch):
    optimizer = torch.optim.Adam(nn.Linear(3, 3).parameters(), capturable=True)
    with pytest.raises(ValueError, match="could not be tried on small tensors.*capturable"):
        stepping(optimizer, CPU)
    # As on a GPU, which torch does not look for in tensors of the host.
    monkeypatch.setattr(sys.modules["torch.optim.adam"], "_get_capturable_supported_devices", lambda *args, **kwargs: ["cpu"])
    assert stepping(optimizer, CPU) is Stepping.ELEMENTS
    torch.set_default_device("meta")  # a user's, for a large model
    try:
        assert stepping(optimizer, CPU) is Stepping.ELEMENTS
    finally:
        torch.set_default_device(None)
