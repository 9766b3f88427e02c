"""Errors that no behaviour of the table leads to: what they say, on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3 import Zero3Strategy
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import ResidencyError, Zero3Engine, gathered

CPU = torch.device("cpu")


class Doing(nn.Linear):
    """Calls a function of itself in its forward."""

    def forward(self, x):
        self.act(self)
        return super().forward(x)


def engine_of(*layers, optimizer=torch.optim.SGD, **options):
    """Two layers that are units, unless others are given; their optimizer and their engine."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layers or (nn.Linear(6, 6), nn.Linear(6, 6))))
    built = optimizer([p for p in model.parameters() if p.requires_grad], lr=0.1)
    communicators = make_collectives(dist.group.WORLD, CPU)
    return (
        model,
        built,
        Zero3Engine(
            model, [built], device=CPU, collectives=communicators, unit_policy=list, **options
        ),
    )


def loss_of(model, engine):
    with engine.step():
        return model(torch.ones(2, 6)).square().mean()


def gathered_in_its_forward():
    layer = Doing(6, 6)
    model, _, engine = engine_of(layer)

    def act(layer):
        with gathered(layer, False):
            pass

    layer.act = act
    loss_of(model, engine)


def gathered_twice():
    model, _, engine = engine_of()
    with gathered(model, False), gathered([model[0].weight], False):
        pass


@torch.no_grad()
def written_in_bf16():
    layer = Doing(6, 6)
    layer.act = lambda layer: layer.weight.mul_(2)
    model, _, engine = engine_of(layer, slot_dtype=lambda name, p: torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model, engine)


def gradient_read_in_backward():
    model, _, engine = engine_of(reduce_once=True)
    with engine.accumulate(), engine.backward():
        loss_of(model, engine).backward()
    model[1].bias.register_hook(lambda grad: model[0].weight.grad.norm())
    with engine.backward():
        loss_of(model, engine).backward()


def differentiated():
    model, optimizer, engine = engine_of(nn.Linear(6, 6))

    def backward():
        with engine.backward():
            loss_of(model, engine).backward()

    backward()
    return model[0], optimizer.param_groups[0]["params"], backward


def gradient_of_another_shape():
    model, _, engine = engine_of(nn.Linear(6, 4), nn.Linear(4, 6))
    model[0].weight.grad = torch.zeros(4, 6).t()


def gradient_turned():
    model, _, engine = engine_of(nn.Linear(6, 4), nn.Linear(4, 6))
    with engine.backward():
        loss_of(model, engine).backward()
    model[0].weight.grad.t_().mul_(2)


def copied_into_where_torch_raises():
    model, _, _ = engine_of(nn.Linear(4, 4))
    model[0].weight.copy_(torch.ones(4, 4))


SHARDED = [
    (
        copied_into_where_torch_raises,
        RuntimeError,
        r"leaf Variable that requires grad .*'0\.weight'.*under `torch\.no_grad\(\)`",
    ),
    (
        gradient_of_another_shape,
        RuntimeError,
        r"size of tensor a .* must match the size of tensor b",
    ),
    (
        gradient_turned,
        RuntimeError,
        r"size of tensor a .* must match the size of tensor b",
    ),
    (gathered_in_its_forward, ResidencyError, r"unit 0 .*`gathered`.*a forward that uses them"),
    (gathered_twice, ResidencyError, r"unit 0 .*`gathered`.*gathered once more"),
    (
        written_in_bf16,
        ResidencyError,
        r"'0\.weight' was changed in place while it is unsharded in torch\.bfloat16.*torch\.float32",
    ),
    (
        gradient_read_in_backward,
        ResidencyError,
        r"gradient of parameter '0\.weight' was read, or set, in a backward",
    ),
]


def raising(rank, world_size, index):
    provoke, kind, text = SHARDED[index]
    with pytest.raises(kind, match=text):
        provoke()


@pytest.mark.parametrize("index", range(len(SHARDED)), ids=lambda index: SHARDED[index][0].__name__)
def test_every_rank_says(index):
    run_ranks(raising, 2, index, timeout=30)


def test_a_dtype_that_nothing_travels_in():
    with pytest.raises(
        ValueError, match="reduce_dtype of Zero3Strategy is 'bf16' or None, not 'fp16'"
    ):
        Zero3Strategy(reduce_dtype="fp16")
