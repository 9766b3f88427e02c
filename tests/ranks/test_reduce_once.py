"""Gradients that are reduced once for several backward passes: whatever comes between, the
optimizer sees the whole sum.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from helpers.tracking import needs_cuda
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine

WIDTH, MICRO_BATCHES = 16, 4


class Net(nn.Module):
    """Blocks of which a batch may skip some."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, skip=()):
        for k, block in enumerate(self.blocks):
            # also where it is skipped: all ranks must run the same modules
            out = torch.tanh(block(x))
            x = x if k in skip else x + out
        return x * self.scale


def batch(rank, step, micro, device="cpu"):
    return torch.randn(
        3, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    ).to(device)


# What happens in the micro-batches of a window: blocks that are not used, on rank 0 or on all
# ranks.
SKIPPED = {
    "all used": lambda rank, micro: (),
    "unused in the last": lambda rank, micro: (1, 3) if micro == MICRO_BATCHES - 1 else (),
    "used in the first only": lambda rank, micro: (2,) if micro else (),
    "used in the last only": lambda rank, micro: () if micro == MICRO_BATCHES - 1 else (2,),
    "never used": lambda rank, micro: (0,),
    "unused on a rank": lambda rank, micro: (1,) if rank == 0 and micro else (),
}


def make():
    torch.manual_seed(0)
    model = Net()
    optimizers = [
        torch.optim.SGD(
            list(model.blocks[:2].parameters()) + [model.scale],
            lr=0.1,
            momentum=0.9,
            weight_decay=0.1,
        ),
        torch.optim.SGD(model.blocks[2:].parameters(), lr=0.2),
    ]
    return model, optimizers


def reference(world_size, skipped, cleared_before):
    """The window on one process: the mean over ranks of sums over micro-batches."""
    model, optimizers = make()
    states = []
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            if micro == cleared_before:
                optimizers[0].zero_grad()
            for rank in range(world_size):
                (
                    model(batch(rank, step, micro), SKIPPED[skipped](rank, micro)).square().mean()
                    / world_size
                ).backward()
        for optimizer in optimizers:
            optimizer.step()
        states.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return states


class Sharded:
    """The model under the engine; counts reductions."""

    def __init__(self, device="cpu"):
        self.model, self.optimizers = make()
        self.device = torch.device(device)
        communicators = make_collectives(dist.group.WORLD, self.device)
        units = lambda model: [model, *model.blocks]  # noqa: E731
        self.engine = Zero3Engine(
            self.model,
            self.optimizers,
            device=self.device,
            collectives=communicators,
            unit_policy=units,
            reduce_once=True,
        )
        self.reductions, reduce = 0, communicators.reduce_scatter

        def counted(*args):
            self.reductions += 1
            return reduce(*args)

        communicators.reduce_scatter = counted

    def micro_batch(self, rank, step, micro, skip=(), hold=True):
        with self.engine.accumulate() if hold else nullcontext():
            with self.engine.step():
                loss = self.model(batch(rank, step, micro, self.device), skip).square().mean()
            with self.engine.backward():
                loss.backward()

    def values(self):
        return {
            name: value.to("cpu", copy=True)
            for unit in self.engine.units
            for name, value in unit.values().items()
        }


def train(rank, world_size, cases, device="cpu"):
    results = {}
    for skipped, cleared_before, look in cases:
        run, states = Sharded(device), []
        for step in range(3):
            for optimizer in run.optimizers:
                optimizer.zero_grad()
            for micro in range(MICRO_BATCHES):
                if micro == cleared_before:
                    run.optimizers[0].zero_grad(set_to_none=look != "zeroed")
                    if look == "read cleared":
                        assert (
                            run.model.blocks[1].weight.grad is None
                            and run.model.blocks[3].weight.grad is not None
                        )
                # "step": the optimizer comes while everything is still held.
                hold = micro < MICRO_BATCHES - 1 or look == "step"
                run.micro_batch(rank, step, micro, SKIPPED[skipped](rank, micro), hold)
                if look == "read" and micro == 1:
                    assert run.model.blocks[1].weight.grad.isfinite().all()
                if look == "clear" and micro == 0:
                    for p in run.model.blocks[:2].parameters():
                        p.grad = None
                    run.model.scale.grad = None
            for optimizer in run.optimizers:
                optimizer.step()
            states.append(run.values())
        results[skipped, cleared_before, look] = states, run.reductions
    return results


CASES = [
    *((skipped, None, None) for skipped in SKIPPED),
    ("all used", 2, None),
    ("unused in the last", 1, None),
    ("all used", None, "read"),
    ("all used", 1, "clear"),
    ("all used", 1, "read cleared"),
    ("all used", 2, "zeroed"),
    ("all used", None, "step"),
    ("unused on a rank", None, "step"),
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_window_is_the_sum_of_its_micro_batches(world_size):
    for results in run_ranks(train, world_size, CASES, timeout=60):
        for (skipped, cleared_before, look), (states, reductions) in results.items():
            torch.testing.assert_close(
                states, reference(world_size, skipped, cleared_before), rtol=2e-6, atol=2e-6
            )
            # who reads gradients, or sets them to zeros, has those that are held reduced
            extra = 2 if look in ("read", "zeroed") else 1
            if world_size > 1:  # one rank has nobody to wait for, and reduces what it has
                assert reductions == 3 * 5 * extra, (skipped, look)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_window_on_a_gpu(world_size):
    for results in run_ranks(train, world_size, CASES, "cuda", timeout=100):
        for (skipped, cleared_before, _), (states, _) in results.items():
            # The matrices of a GPU add up in another order.
            torch.testing.assert_close(
                states, reference(world_size, skipped, cleared_before), rtol=1e-5, atol=1e-5
            )


class Stop(Exception):
    """Of a backward."""


def stop(grad):
    raise Stop


def failing(rank, world_size, at_once):
    """An exception in the backward of the third micro-batch: before it adds anything, or in the
    middle.
    """
    run = Sharded()
    for micro in range(2):
        run.micro_batch(rank, 0, micro)
    handle = run.model.blocks[1].register_forward_hook(
        lambda module, args, output: output.register_hook(stop) and None
    )
    with pytest.raises(Stop), run.engine.accumulate():
        with run.engine.step():
            loss = run.model(batch(rank, 0, 2)).square().mean()
        if at_once:
            loss.register_hook(stop)
        with run.engine.backward():
            loss.backward()
    handle.remove()
    if at_once:
        run.micro_batch(rank, 0, 2)
        run.micro_batch(rank, 0, 3, hold=False)
    else:
        assert not any(p.grad is not None for p in run.model.parameters())
        for micro in range(MICRO_BATCHES):
            run.micro_batch(rank, 0, micro, hold=micro < MICRO_BATCHES - 1)
    for optimizer in run.optimizers:
        optimizer.step()
    return run.values()


@pytest.mark.parametrize("at_once", [False, True])
def test_an_exception_in_the_middle_clears_gradients(at_once):
    expected = reference(2, "all used", None)[0]
    for values in run_ranks(failing, 2, at_once, timeout=30):
        torch.testing.assert_close(values, expected, rtol=2e-6, atol=2e-6)


def toggled(rank, world_size):
    """The first optimizer is switched off when a backward of the other fails; its gradients were
    held with that one's.
    """
    run = Sharded()
    run.micro_batch(rank, 0, 0)
    flat = [p for group in run.optimizers[0].param_groups for p in group["params"]]
    for p in flat:
        p.requires_grad_(False)
    handle = run.model.blocks[2].register_forward_hook(
        lambda module, args, output: output.register_hook(stop) and None
    )
    with pytest.raises(Stop):
        run.micro_batch(rank, 0, 1)
    handle.remove()
    for p in flat:
        p.requires_grad_(True)
    assert [p.grad for p in flat] == [None] * len(flat)


def test_gradients_that_were_held_for_another_optimizer_are_cleared_too():
    run_ranks(toggled, 2, timeout=30)


def memory(rank, world_size):
    run = Sharded()
    return run.engine.reducer.buffer.nbytes


def test_it_costs_a_full_size_fp32_gradient():
    parameters = sum(p.numel() for p in Net().parameters())
    for nbytes in run_ranks(memory, 2):
        # each unit starts at a multiple of 256 bytes
        assert 4 * parameters <= nbytes <= 4 * parameters + 5 * 256
