"""What is gathered, or made for later, under `inference_mode` is as good outside of it."""

import torch
import torch.distributed as dist
from torch import nn

from helpers.contracts import WIDTH, Block, build
from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import ComparedCollectives, Meeting
from lightning_zero3.strategies.engine import gathered
from lightning_zero3.strategies.engine.streams import Stream


class Looking(Block):
    """Keeps what its first layer returned, and whether its weights were made for inference only."""

    found: list[bool]
    writes = False

    def forward(self, x):
        self.found = [p.is_inference() for p in self.parameters()]
        self.hidden = self.first(x)
        if self.writes:
            self.first.bias.mul_(2)
        return x + self.second(torch.relu(self.hidden))


def built(rank, world_size, **options):
    """The engine's model, and one on this rank alone."""
    model, _, engine = build(rank, world_size, block=Looking, **options)
    torch.manual_seed(0)
    return model, nn.Sequential(*[Looking() for _ in range(len(model))]), engine


def between_steps(rank, world_size):
    """Values are read and written, gradients read, kept, written and assigned; then all of them are
    used.
    """
    model, alone, engine = built(rank, world_size)
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)

    def train(each):
        each(x).square().mean().backward()

    with torch.inference_mode(), gathered(model, modify=True):
        model[0].first.weight.mul_(2)
    with torch.no_grad():
        alone[0].first.weight.mul_(2)
    p, q = model[1].first.weight, alone[1].first.weight
    for _ in range(2):
        train(alone)
        with engine.backward():
            train(model)
        with torch.inference_mode():
            kept = p.grad
            model[2].first.bias.grad = torch.ones(model[2].first.bias.shape)
        alone[2].first.bias.grad = torch.ones(model[2].first.bias.shape)
        kept.mul_(3)
        q.grad.mul_(3)
        torch.testing.assert_close(p.grad.clone(), q.grad)
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, check_stride=False)
    return True


def test_values_and_gradients_between_steps():
    assert run_ranks(between_steps, 2) == [True, True]


def saved_weight(rank, world_size):
    """A weight that autograd has saved is looked up under `inference_mode` first, and then by a
    backward with a graph.
    """
    model, alone, engine = built(rank, world_size)
    gradients = []
    for each in (model, alone):
        x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).requires_grad_()
        with engine.step():
            each(x)
        with torch.inference_mode():
            torch.testing.assert_close(
                each[0].hidden.grad_fn._saved_mat2, alone[0].first.weight.t()
            )
        (first,) = torch.autograd.grad(each[0].hidden.square().sum(), x, create_graph=True)
        gradients += [first, *torch.autograd.grad(first.square().sum(), x)]
    torch.testing.assert_close(gradients[:2], gradients[2:])
    return True


def test_weights_that_autograd_has_saved():
    assert run_ranks(saved_weight, 2) == [True, True]


def exchange(rank, world_size):
    """The communicator keeps memory for the next time."""
    communicator, found = ComparedCollectives(dist.group.WORLD), []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            communicator.meet(Meeting.GATHERED)
            found.append(
                (
                    communicator.agree(torch.tensor([rank])).item(),
                    communicator.reduce_scatter(torch.ones(4)).wait().tolist(),
                )
            )
    return found


def test_exchanges():
    assert run_ranks(exchange, 2) == [[(1, [2.0, 2.0])] * 2] * 2


def allocated_in_inference_mode(rank, world_size):
    _, _, engine = build(rank, world_size)
    with torch.inference_mode():
        gradients = engine.gradients.chunks[0].room_for_gradients()
        tensors = [gradients, Stream(engine.device).room]
        assert gradients._version == 0
    return [tensor.is_inference() for tensor in tensors]


def test_memory_of_a_rank_that_assists_is_ordinary():
    """Training writes to it later."""
    assert run_ranks(allocated_in_inference_mode, 2) == [[False, False]] * 2
