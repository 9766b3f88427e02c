"""The debug mode finds what ordinary runs cannot see, and changes no number."""

import ctypes

import torch
from torch import nn

from helpers.ranks import run_ranks

BLOCKS = 5
address_of = torch._C.TensorBase.data_ptr  # as an extension in C++ has it


class Block(nn.Module):
    def __init__(self, wiped=False):
        super().__init__()
        self.linear, self.wiped = nn.Linear(48, 48), wiped

    def forward(self, x):
        if self.wiped:
            ctypes.memset(address_of(self.linear.weight), 0, self.linear.weight.nbytes)
        self.address = address_of(self.linear.bias)
        return x + torch.tanh(self.linear(x))


def train(rank, world_size, container, wiped, debug):
    """Losses, and the error that ended the training."""
    import torch.distributed as dist

    from lightning_zero3.strategies.checked_units import CheckedUnit
    from lightning_zero3.strategies.communicators import make_collectives
    from lightning_zero3.strategies.engine import Unit, Zero3Engine

    torch.manual_seed(1)
    model = container(*[Block(k == wiped) for k in range(BLOCKS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.device("cpu")
    communicators = make_collectives(dist.group.WORLD, device)
    engine = Zero3Engine(
        model,
        [optimizer],
        device=device,
        collectives=communicators,
        unit_policy=[Block],
        unit_class=CheckedUnit if debug else Unit,
    )
    losses = []
    for step in range(3):
        batch = torch.randn(2, 48, generator=torch.Generator().manual_seed(2 * step + rank))
        try:
            with engine.step():
                loss = model(batch).square().mean()
            losses.append(loss.item())
            with engine.backward():
                loss.backward()
        except Exception as error:
            return losses, f"{type(error).__name__}: {error}"
        optimizer.step()
        optimizer.zero_grad()
    return losses, ""


def test_debug_changes_no_number():
    plain = run_ranks(train, 2, nn.Sequential, None, False)
    assert [error for _, error in plain] == ["", ""]
    assert run_ranks(train, 2, nn.Sequential, None, True) == plain


def test_a_write_past_torch_is_an_error_that_names_the_parameter():
    for _, message in run_ranks(train, 2, nn.Sequential, 2, True):
        assert (
            message.startswith("ResidencyError")
            and "2.linear.weight" in message
            and "no_grad" in message
        )


class Ordered(nn.Sequential):
    """Runs its blocks in an order of its own, in the second step that it takes."""

    order, steps = range(BLOCKS), 0

    def forward(self, x):
        self.steps += 1
        for k in self.order if self.steps == 2 else range(BLOCKS):
            x = self[k](x)
        return x


class OrderedByRank(Ordered):
    def __init__(self, *blocks):
        super().__init__(*blocks)
        self.order = [0, 1, 2, 3, 4] if torch.distributed.get_rank() else [0, 2, 1, 3, 4]


def test_ranks_that_part_are_told_of_the_first_unit_in_which_they_do():
    for _, message in run_ranks(train, 2, OrderedByRank, None, True):
        assert message.startswith("DivergenceError: The ranks run different things: rank "), message
        assert "rank 0 is about to unshard unit 2, rank 1 to unshard unit 1." in message or (
            "rank 1 is about to unshard unit 1, rank 0 to unshard unit 2." in message
        )
