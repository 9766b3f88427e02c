"""A forward and backward in a callback, outside of any step, are as right as inside."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine


class Box:
    """Hides a tensor from hooks on outputs."""

    def __init__(self, tensor):
        self.tensor = tensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 30), nn.Linear(30, 6)

    def forward(self, box):
        return Box(box.tensor + self.down(torch.tanh(self.up(box.tensor))))


def _input_gradient(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(5)))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)).requires_grad_()

    def gradient():
        return torch.autograd.grad(model(Box(x)).tensor.square().sum(), x)[0]

    expected = gradient()
    device = torch.device("cpu")
    group = dist.group.WORLD if dist.is_initialized() else None
    Zero3Engine(
        model, device=device, collectives=make_collectives(group, device), unit_policy=[Block]
    )
    torch.testing.assert_close(gradient(), expected, rtol=0, atol=0)
    with pytest.raises(AttributeError):
        model(x)  # raises inside a unit, whose hooks must not stay
    torch.testing.assert_close(gradient(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_by_way_of_outputs_without_hooks(world_size):
    run_ranks(_input_gradient, world_size)


def _changed_between_two_backwards(rank, world_size):
    torch.manual_seed(0)
    model = nn.Linear(6, 6)

    def differentiate_twice():
        x, weights = torch.ones(4, 6, requires_grad=True), torch.ones(4, 6)
        (gradient,) = torch.autograd.grad(torch.tanh(model(x)), x, weights, create_graph=True)
        weights.mul_(3)  # the graph of the gradient has saved them
        torch.autograd.grad(gradient.sum(), x)

    for sharded in (False, True):
        if sharded:
            device = torch.device("cpu")
            group = dist.group.WORLD if dist.is_initialized() else None
            Zero3Engine(model, device=device, collectives=make_collectives(group, device))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            differentiate_twice()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_a_graph_of_gradients_has_saved_must_not_change(world_size):
    run_ranks(_changed_between_two_backwards, world_size)
