"""What optimizers must see of the model, found out by trying them."""

import sys

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_zero3.strategies.optimizers import classify
from lightning_zero3.strategies.optimizers.classify import Stepping, SteppingTrial, find_stepping


class InBlocks(torch.optim.SGD):
    """Rounds large gradients in blocks, as optimizers with 8-bit state do; small ones not at
    all.
    """

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.numel() > 4096:
                    blocks = p.grad.flatten().split(256)
                    p.grad = torch.cat([(b / b.abs().max() * 127).round() for b in blocks]).view_as(
                        p
                    )
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
            for p in (
                group["params"]
                if group.get("trust") and group["steps"] > group.get("start", 0)
                else ()
            ):
                p.grad = p.grad / p.grad.norm()
        return super().step(closure)


class ByAngle(torch.optim.SGD):
    """Treats matrices otherwise where their gradient is almost orthogonal to them, which numbers at
    random never are.
    """

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
    "cls", sorted((OF_TORCH | TENSORS | {OfItsShape}) - REFUSED.keys(), key=lambda c: c.__name__)
)
def test_what_it_must_see(cls):
    expected = (
        Stepping.MODEL
        if cls is torch.optim.LBFGS
        else Stepping.TENSORS
        if cls in TENSORS
        else Stepping.ELEMENTS
    )
    assert find_stepping(make(cls), CPU) is expected


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
    assert find_stepping(ByOption(groups, lr=0.1), CPU) is expected


@pytest.mark.parametrize("lr", [0.0, 1e-9, 1e-6, torch.tensor(1e-6)])
def test_a_warm_up_from_next_to_nothing_shows_nothing_at_first(lr):
    assert (
        find_stepping(torch.optim.Adam(nn.Linear(3, 3).parameters(), lr=lr, foreach=False), CPU)
        is Stepping.ELEMENTS
    )
    assert (
        find_stepping(
            ByOption([{"params": nn.Linear(3, 3).parameters(), "trust": True}], lr=lr), CPU
        )
        is Stepping.TENSORS
    )


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
    assert find_stepping(optimizer, CPU) is expected


@pytest.mark.parametrize("cls", REFUSED)
def test_refused(cls):
    with pytest.raises(ValueError, match=REFUSED[cls]):
        find_stepping(make(cls), CPU)


def test_it_is_tried_on_the_device_of_the_shards(monkeypatch):
    optimizer = torch.optim.Adam(nn.Linear(3, 3).parameters(), capturable=True)
    with pytest.raises(ValueError, match="could not be tried on small tensors.*capturable"):
        find_stepping(optimizer, CPU)
    # As on a GPU, which torch does not look for in tensors of the host.
    monkeypatch.setattr(
        sys.modules["torch.optim.adam"],
        "_get_capturable_supported_devices",
        lambda *args, **kwargs: ["cpu"],
    )
    assert find_stepping(optimizer, CPU) is Stepping.ELEMENTS
    torch.set_default_device("meta")  # a user's, for a large model
    try:
        assert find_stepping(optimizer, CPU) is Stepping.ELEMENTS
    finally:
        torch.set_default_device(None)


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


RARE = {  # rules of a moment that no trial has
    "a gradient that is not finite": lambda p, grad, group: (
        grad if torch.isfinite(grad).all() else grad * 0
    ),
    "a large norm": lambda p, grad, group: grad * (1e6 / (grad.norm() + 1e-6)).clamp(max=1),
    "a large norm, by a function": lambda p, grad, group: (
        grad * (1e6 / (torch.linalg.norm(grad) + 1e-6)).clamp(max=1)
    ),
    "a large norm, of a list": lambda p, grad, group: (
        grad * (1e6 / (torch._foreach_norm([grad])[0] + 1e-6)).clamp(max=1)
    ),
    "a large norm, computed before in a list": lambda p, grad, group: (
        grad * (1e6 / (torch._foreach_mul([grad], 2.0)[0].norm() + 1e-6)).clamp(max=1)
    ),
    "a large norm, of a product with a number": lambda p, grad, group: (
        grad if (torch.tensor(2.0) * grad).norm() < 1e6 else p
    ),
    "a large norm, flattened": lambda p, grad, group: grad if grad.flatten().norm() < 1e6 else p,
    "a large maximum": lambda p, grad, group: grad if grad.abs().max() < 1e6 else grad * 0,
    "few elements": lambda p, grad, group: grad.sign() if p.numel() < 3 else grad,
    "few elements, of a shape": lambda p, grad, group: grad.sign() if p.shape.numel() < 3 else grad,
    "few rows": lambda p, grad, group: grad.sign() if len(p) < 3 else grad,
    "strides": lambda p, grad, group: grad.sign() if p.stride() == (5,) else grad,
    "an attribute": lambda p, grad, group: grad * 0 if getattr(p, "_frozen", False) else grad,
    "another tensor's values": lambda p, grad, group: grad.sign() if torch.equal(p, grad) else grad,
    "a norm in one of two groups, at numbers of the group": lambda p, grad, group: (
        grad / max(grad.norm() / group["lr"], 1e9)
    ),
}
OF_ELEMENTS = {
    "signs": lambda p, grad, group: grad.sign() * p.abs().clamp(min=0.1),
    "lists": lambda p, grad, group: torch._foreach_add(torch._foreach_mul([grad], 2.0), [p])[0],
    "a number first": lambda p, grad, group: torch.where(
        2.0 * grad > 1, grad, torch.zeros_like(grad)
    ),
    "a new tensor": lambda p, grad, group: grad + grad.new_zeros(()) + torch.empty_like(p).fill_(0),
    "questions about types": lambda p, grad, group: (
        grad if p.is_complex() or grad.is_sparse or not p.is_contiguous() else grad * 2
    ),
}


@pytest.mark.parametrize("name", [*RARE, *OF_ELEMENTS])
def test_what_asks_for_more_than_elements_needs_whole_tensors(name):
    optimizer = Rule(nn.Linear(3, 3).parameters(), lr=0.1, rule=(RARE | OF_ELEMENTS)[name])
    assert find_stepping(optimizer, CPU) is (
        Stepping.TENSORS if name in RARE else Stepping.ELEMENTS
    )


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
    assert (
        find_stepping(WithClosure(nn.Linear(3, 3).parameters(), 0.1, extragradient), CPU)
        is Stepping.ELEMENTS
    )
    for move in (sharpness_aware, by_loss):
        with pytest.raises(ValueError, match="combines several parameters"):
            find_stepping(WithClosure(nn.Linear(3, 3).parameters(), 0.1, move), CPU)


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


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Stepping.ELEMENTS),
        ({"picked": True}, Stepping.TENSORS),
        ({"normalise": True}, Stepping.TENSORS),
    ],
)
def test_it_is_tried_with_methods_and_dicts_that_it_keeps_and_with_required_arguments(
    config, expected
):
    assert find_stepping(Keeps(nn.Linear(3, 3).parameters(), 0.1, 100, **config), CPU) is expected


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


@pytest.mark.parametrize(
    ("normalise", "expected"), [(False, Stepping.ELEMENTS), (True, Stepping.TENSORS)]
)
def test_it_is_made_again_from_groups(normalise, expected):
    groups = [
        {"params": list(nn.Linear(3, 3).parameters()), "lr": 0.1, "normalise": on}
        for on in (False, normalise)
    ]
    assert find_stepping(OnlyGroups(groups), CPU) is expected


class Late(torch.optim.SGD):
    """Does nothing before a step that no option names."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        return super().step(closure) if self.steps >= self.param_groups[0]["weight_decay"] else None


def test_an_optimizer_may_begin_late():
    assert (
        find_stepping(Late(nn.Linear(3, 3).parameters(), lr=0.1, weight_decay=20.5), CPU)
        is Stepping.ELEMENTS
    )
    with pytest.raises(ValueError, match="Late made no update of small tensors in 200 steps"):
        find_stepping(Late(nn.Linear(3, 3).parameters(), lr=0.1, weight_decay=1e9), CPU)


class InState(torch.optim.SGD):
    """Momentum as the state has it: a tensor for each element, or not."""

    kinds = {
        "a tensor": torch.zeros_like,
        "a number": lambda p: 0.0,
        "a dict": lambda p: {0.9: torch.zeros_like(p)},
        "a list": lambda p: [torch.zeros_like(p)],
        "another shape": lambda p: torch.zeros(1),
    }

    def __init__(self, params, lr, kind):
        super().__init__(params, lr=lr)
        self.kind = kind

    def step(self, closure=None):
        for p in [p for group in self.param_groups for p in group["params"]]:
            self.state[p].setdefault("momentum", self.kinds[self.kind](p))
        return super().step(closure)


@pytest.mark.parametrize("kind", InState.kinds)
def test_state_that_shards_cannot_be_cut_from_needs_whole_tensors(kind):
    optimizer = InState(nn.Linear(3, 3).parameters(), 0.1, kind)
    assert find_stepping(optimizer, CPU) is (
        Stepping.ELEMENTS if kind in ("a tensor", "a number") else Stepping.TENSORS
    )


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
    assert find_stepping(optimizer, CPU) is Stepping.ELEMENTS
    assert not optimizer.param_groups[0]["train_mode"]


def test_a_trial_leaves_the_optimizer_and_the_hooks_of_all_optimizers_alone():
    options = {"buffer": [[None, 0]], "table": {"rate": 1}}
    seen = []

    def count(p, grad, group):
        group["buffer"][0][1] += 1
        group["table"]["rate"] += 1
        return grad

    optimizer = Rule([{"params": nn.Linear(3, 3).parameters(), **options}], lr=0.1, rule=count)
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        assert find_stepping(optimizer, CPU) is Stepping.ELEMENTS
        assert (seen, optimizer.param_groups[0]["buffer"], optimizer.param_groups[0]["table"]) == (
            [],
            [[None, 0]],
            {"rate": 1},
        )
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
        assert seen == [1]
    finally:
        handle.remove()


def test_options_that_turn_a_rule_on_later_are_tried_then(monkeypatch):
    trial = SteppingTrial(ByOption(nn.Linear(3, 3).parameters(), lr=0.1), CPU)
    group = trial.optimizer.param_groups[0]
    trials = []
    find_out = classify._classify
    monkeypatch.setattr(classify, "_classify", lambda *args: trials.append(args) or find_out(*args))
    for step in range(5):
        group["lr"], group["steps"], group["weight_decay"] = 0.1 / (step + 1), step, 0.1 * step
        trial.try_new_options()
    # for numbers that were not there or 0; that they change in every step turns nothing on
    assert len(trials) == 2
    group["trust"] = True
    with pytest.raises(
        ValueError,
        match=r"ByOption steps on shards.* group 0 has trust=True, with which it looks at whole",
    ):
        trial.try_new_options()
    del group["trust"]
    trial.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "trust": True})
    with pytest.raises(ValueError, match="group 1 has trust=True"):
        trial.try_new_options()


def test_options_may_change_where_it_steps_on_whole_tensors():
    groups = [
        {"params": nn.Linear(3, 3).parameters()},
        {"params": nn.Linear(3, 3).parameters(), "trust": True},
    ]
    trial = SteppingTrial(ByOption(groups, lr=0.1), CPU)
    trial.optimizer.param_groups[0]["trust"] = True
    trial.try_new_options()
    assert trial.stepping is Stepping.TENSORS


class PerDimension(torch.optim.SGD):
    """Keeps a square matrix for each dimension, which has no end for long vectors."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in [p for group in self.param_groups for p in group["params"]]:
            for dim in range(p.dim()):
                assert p.size(dim) < 100, "tried with what is large"
                matrix = torch.eye(p.size(dim)) + torch.tensordot(
                    p.grad, p.grad, [[d for d in range(p.dim()) if d != dim]] * 2
                )
                p.grad = torch.tensordot(
                    torch.linalg.inv(matrix), p.grad.movedim(dim, 0), 1
                ).movedim(0, dim)
        super().step()
        return loss


def test_one_that_asks_is_not_tried_with_large_tensors():
    assert (
        find_stepping(PerDimension(nn.Linear(3, 3).parameters(), lr=0.1), CPU) is Stepping.TENSORS
    )


class SkipsSpikes(torch.optim.SGD):
    """Skips a step if any gradient is large or not finite, from step ``warmup`` on."""

    def __init__(self, params, lr, warmup=0, bound=1e4):
        super().__init__(params, lr=lr)
        self.warmup, self.bound, self.number = warmup, bound, 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.number += 1
        if self.number <= self.warmup or all(grad.abs().max() < self.bound for grad in gradients):
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
    [{}, {"bound": float("inf")}, {"warmup": 20}, {"warmup": 150}, {"bound": 1e8, "warmup": 60}],
)
def test_it_is_tried_with_gradients_that_are_large_or_not_finite(options):
    with pytest.raises(
        ValueError,
        match="combines several parameters.*skips when any gradient is large or not finite",
    ):
        find_stepping(SkipsSpikes(nn.Linear(3, 3).parameters(), 0.1, **options), CPU)
    assert (
        find_stepping(ClipsItself(nn.Linear(3, 3).parameters(), 0.1, **options), CPU)
        is Stepping.TENSORS
    )
