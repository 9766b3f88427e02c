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


class ReadsMemory(nn.Sequential):
    """Reads a parameter outside of its block in a way that asks nobody, as a C++ extension
    would.
    """

    def forward(self, x):
        x = super().forward(x)
        with torch._C.DisableTorchFunctionSubclass():
            return x + self[0].linear.bias


class WritesMemory(nn.Sequential):
    """Writes to where a parameter was while its block was in use, as an extension that has kept the
    address would.
    """

    def forward(self, x):
        x = super().forward(x)
        ctypes.memset(self[0].address, 0, self[0].linear.bias.nbytes)
        return x


def train(rank, world_size, container, wiped, debug):
    """Losses, and the error that ended the training."""
    import torch.distributed as dist

    from lightning_zero3.strategies.collectives import make_collectives
    from lightning_zero3.strategies.engine import Zero3Engine

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
        debug=debug,
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


def test_stale_memory_reads_nan():
    for losses, message in run_ranks(train, 2, ReadsMemory, None, True):
        assert losses[0] != losses[0] and not message, "it must not look like numbers"


def test_a_write_to_memory_that_was_given_up_is_an_error_that_names_the_unit():
    for _, message in run_ranks(train, 2, WritesMemory, None, True):
        assert message.startswith(
            "ResidencyError: The memory of unit 0 was written while its parameters rested"
        ), message


def overlap(rank, world_size):
    """Gather two units into the same memory."""
    from lightning_zero3.strategies.engine.layout import ArenaLayout
    from lightning_zero3.strategies.engine.unit import Phase, Unit

    build = ArenaLayout.build
    ArenaLayout.build = lambda sizes, apart, **ends: build(sizes, [False] * len(sizes), **ends)

    units, connect = {}, Unit.connect

    def remember(unit, *args):
        units[unit.index] = unit
        connect(unit, *args)

    def gather(unit):
        for filled in (unit, units.get(unit.index + 2, unit)):
            if filled.phase is Phase.RESTING:
                filled.phase = Phase.GATHERING
                filled._arena.holders.append(filled)
                filled._start()
        return True

    Unit.connect, Unit.gather = remember, gather
    return train(rank, world_size, nn.Sequential, None, True)


def test_two_owners_of_a_slot_are_an_error_that_names_the_second():
    for _, message in run_ranks(overlap, 2):
        assert message.startswith(
            "ResidencyError: The memory of unit 2 was written while its parameters rested"
        ), message


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
        assert "rank 0 is about to gather unit 2, rank 1 to gather unit 1." in message or (
            "rank 1 is about to gather unit 1, rank 0 to gather unit 2." in message
        )
