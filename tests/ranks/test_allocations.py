"""Memory that the engine asks for in a step after the first: gradients on the CPU, nothing on a device."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from helpers.contracts import BLOCKS, IN_THE_SLOTS, ON_THE_WIRE, UNIT_BYTES, WIDTH, Allocations, Block, build, micro_batch
from helpers.ranks import run_ranks
from helpers.tracking import needs_cuda


class Spare(Block):
    """With a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


def clip(engine, optimizer):
    """As ``Trainer(gradient_clip_val=0.1)`` does it."""
    from lightning_zero3.strategies.precision import Zero3Precision

    plugin = Zero3Precision(
        sum_over_ranks=engine.collectives.all_reduce,
        adopt_gradients=engine.adopt_gradients,
        unguard=lambda optimizer: engine.guard(optimizer, False),
    )
    plugin.clip_gradients(optimizer, 0.1)


ON_WIRE = "bf16 on the wire"
# Name -> what the engine is built with, micro-batches, whether gradients are clipped.
VARIANTS = {
    "plain": ({}, 1, False),
    "adamw, clipped": ({"optimizer": torch.optim.AdamW}, 1, True),
    "accumulation": ({}, 3, False),
    "reduced once": ({"reduce_once": True}, 3, False),
    "bf16-mixed": (IN_THE_SLOTS, 1, True),
    ON_WIRE: (ON_THE_WIRE, 1, False),
    "unused parameters": ({"block": Spare, "optimizer": torch.optim.AdamW}, 2, False),
}


def step(model, optimizer, engine, rank, micro_batches, clipped, seed):
    for micro in range(micro_batches):
        with engine.accumulate() if micro < micro_batches - 1 else nullcontext():
            micro_batch(model, engine, rank, micro_batches * seed + micro)
    if clipped:
        clip(engine, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def memory_of_a_step(rank, world_size, lasting, device="cpu", blocks=BLOCKS):
    """Variant -> bytes and callers of each allocation of our code in a step after the first, the optimizer's included."""
    found = {}
    for name, (options, micro_batches, clipped) in VARIANTS.items():
        model, optimizer, engine = build(rank, world_size, device=device, blocks=blocks, **options)
        engine.reducer.lasting = lasting
        with torch.autocast(device, torch.bfloat16) if name == "bf16-mixed" else nullcontext():
            for seed in range(2):
                step(model, optimizer, engine, rank, micro_batches, clipped, seed)
            with Allocations() as allocations:
                step(model, optimizer, engine, rank, micro_batches, clipped, 2)
            found[name] = list(allocations.found)
            # The mode works: it sees an allocation that engine code makes outside a step.
            with allocations:
                engine.units[0].values()
            assert [caller for nbytes, caller in allocations.found[len(found[name]) :] if nbytes >= 1024] == ["_gather_apart"]
    return found


def large(found):
    """Callers of those that are more than a few numbers: a bias's shard has 1 KiB."""
    return Counter(caller for nbytes, caller in found if nbytes >= 1024)


def runs(blocks):
    """What rounds or widens values begins with a run of 4096 that it copies, for each gather and each reduction."""
    return Counter({"widen": 2 * blocks - 2, "narrow": blocks})


@pytest.mark.parametrize("world_size", [2, 4])
def test_on_the_cpu_gradients_alone(world_size):
    """Once for each group, when a loss begins to be differentiated: before it, when most memory is in use, they are freed."""
    expected = dict.fromkeys(VARIANTS, Counter(["grad"]))
    expected[ON_WIRE] = expected[ON_WIRE] + runs(BLOCKS)
    for found in run_ranks(memory_of_a_step, world_size, False, timeout=60):
        assert {name: large(allocations) for name, allocations in found.items()} == expected
        (nbytes,) = (nbytes for nbytes, _ in found["plain"] if nbytes >= 1024)
        assert nbytes == BLOCKS * UNIT_BYTES // world_size + 16  # and the tail of the group
        assert max(nbytes for nbytes, caller in found[ON_WIRE] if caller in runs(BLOCKS)) == 2 * 4096


def test_nothing_where_gradients_keep_their_memory():
    """As they do on a device. What is left are numbers: votes, and norms of runs of a flat gradient."""
    few, many = (run_ranks(memory_of_a_step, 2, True, "cpu", blocks) for blocks in (BLOCKS, 2 * BLOCKS))
    for rank in range(2):
        for name in VARIANTS:
            counts = [len(found[rank][name]) for found in (few, many)]
            if name == ON_WIRE:
                scratch = [runs(BLOCKS), runs(2 * BLOCKS)]
                assert [large(found[rank][name]) for found in (few, many)] == scratch
                counts = [count - part.total() for count, part in zip(counts, scratch, strict=True)]
            else:
                assert large(few[rank][name]) == large(many[rank][name]) == Counter()
            assert counts[0] == counts[1] <= 40, (name, counts)  # none for a unit


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_on_a_gpu(world_size):
    expected = dict.fromkeys(VARIANTS, Counter())
    expected[ON_WIRE] = runs(BLOCKS) if world_size > 1 else Counter()
    for found in run_ranks(memory_of_a_step, world_size, True, "cuda", timeout=100):
        assert {name: large(allocations) for name, allocations in found.items()} == expected
