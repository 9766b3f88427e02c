"""Values that an optimizer, or the user, writes to flat tensors in the middle of a step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.parity import RTOL
from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine

CPU = torch.device("cpu")


def pair():
    """Two networks of two units each, with an optimizer for each."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            name: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
            for name in ("made", "judged")
        }
    )
    return model, [torch.optim.SGD(model[name].parameters(), lr=0.5) for name in ("made", "judged")]


def sharded():
    model, optimizers = pair()
    communicator = make_collectives(dist.group.WORLD if dist.is_initialized() else None, CPU)
    return (
        model,
        optimizers,
        Zero3Engine(
            model, optimizers, device=CPU, collectives=communicator, unit_policy=["Linear"]
        ),
    )


def batch(rank, step):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def score(model, x):
    return model["judged"](x).square().mean()


def in_turns(model, optimizers, batches, differentiate):
    """Adversarial training: an optimizer steps between the forwards of one step. Returns losses, of
    one batch each.
    """
    made, judged = optimizers
    losses = []
    for x in batches:
        real = [score(model, each) for each in x]
        fake = [score(model, model["made"](each).detach()) for each in x]
        differentiate(sum(a - b for a, b in zip(real, fake, strict=True)) / len(x))
        judged.step()
        judged.zero_grad()
        fake = [score(model, model["made"](each)) for each in x]
        differentiate(sum(fake) / len(x))
        made.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append([loss.item() for loss in (*real, *fake)])
    return losses


def train(rank, world_size):
    model, optimizers, engine = sharded()

    def differentiate(loss):
        with engine.backward():
            loss.backward()

    losses = []
    for step in range(3):
        with engine.step():
            losses += in_turns(model, optimizers, [[batch(rank, step)]], differentiate)
    return losses


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_optimizer_steps_in_the_middle_of_a_step(world_size):
    model, optimizers = pair()
    batches = [[batch(rank, step) for rank in range(world_size)] for step in range(3)]
    expected = torch.tensor(in_turns(model, optimizers, batches, lambda loss: loss.backward()))
    assert not torch.allclose(expected[0], expected[2])
    for rank, found in enumerate(run_ranks(train, world_size)):
        torch.testing.assert_close(
            torch.tensor(found), expected[:, [rank, world_size + rank]], rtol=RTOL, atol=1e-6
        )


def write(optimizer):
    with torch.no_grad():
        for group in optimizer.param_groups:
            for flat in group["params"]:
                flat.mul_(0.5)


def written(rank, world_size):
    """Losses before and after all values are halved in the middle of a step, and after; once more
    after all that.
    """
    model, optimizers, engine = sharded()
    x, losses = batch(rank, 0), []
    for _ in range(2):
        with engine.step(), torch.no_grad():
            for _ in range(2):
                losses.append(score(model, x).item())
                write(optimizers[1])
    return losses


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_forward_sees_what_was_written_to_flat_tensors(world_size):
    for rank, found in enumerate(run_ranks(written, world_size)):
        model, optimizers = pair()
        for loss in found:
            torch.testing.assert_close(
                loss, score(model, batch(rank, 0)).item(), rtol=RTOL, atol=1e-6
            )
            write(optimizers[1])


def written_before_backward(rank, world_size):
    for explicit in (False, True):
        # whether a network whose values nobody wrote to runs in between
        for other in (
            False,
            True,
        ):
            if world_size == 1 and not explicit:
                continue  # autograd has read the weights when the engine hears of it
            model, optimizers, engine = sharded()
            with engine.step():
                loss = score(model, batch(rank, 0))
                write(optimizers[1])
                if other:
                    loss = loss + model["made"](batch(rank, 1)).square().mean()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                if explicit:
                    with engine.backward():
                        loss.backward()
                else:
                    loss.backward()
            engine.abandon()
            with engine.step():  # what was not written to is as good as before
                loss = model["made"](batch(rank, 1)).square().mean()
                write(optimizers[1])
            with engine.backward():
                loss.backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_backward_with_values_that_forward_did_not_have_is_an_error(world_size):
    run_ranks(written_before_backward, world_size)
