"""Memory that the engine asks for in a step after the first: gradients on the CPU, nothing on a
device.
"""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from helpers.contracts import (
    BLOCKS,
    IN_THE_SLOTS,
    ON_THE_WIRE,
    UNIT_BYTES,
    WIDTH,
    Allocations,
    Block,
    build,
    micro_batch,
)
from helpers.ranks import run_ranks
from helpers.tracking import needs_cuda


class Bfloat16(Block):
    """As with ``precision="bf16-true"``."""

    def __init__(self):
        super().__init__()
        self.to(torch.bfloat16)


class Float16(Block):
    def __init__(self):
        super().__init__()
        self.to(torch.float16)


class Spare(Block):
    """With a layer that nobody uses."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(WIDTH, WIDTH)


def clip(engine, optimizer):
    """As ``Trainer(gradient_clip_val=0.1)`` does it."""
    from lightning_zero3.strategies.numerics.precision import Zero3Precision

    plugin = Zero3Precision()
    plugin._step_of = engine.steps.__getitem__
    plugin.clip_gradients(optimizer, 0.1)


# Name -> what the engine is built with, micro-batches, whether gradients are clipped.
VARIANTS = {
    "plain": ({}, 1, False),
    "adamw, clipped": ({"optimizer": torch.optim.AdamW}, 1, True),
    "accumulation": ({}, 3, False),
    "reduced once": ({"reduce_once": True}, 3, False),
    "bf16-mixed": (IN_THE_SLOTS, 1, True),
    "bf16 on the wire": (ON_THE_WIRE, 1, False),
    "bf16-true": ({"block": Bfloat16}, 1, True),
    "16-true, accumulation": ({"block": Float16}, 3, False),
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
    """Variant -> bytes and callers of each allocation of our code in a step after the first, the
    optimizer's included.
    """
    found = {}
    for name, (options, micro_batches, clipped) in VARIANTS.items():
        model, optimizer, engine = build(rank, world_size, device=device, blocks=blocks, **options)
        engine.gradients.lasting = lasting
        with torch.autocast(device, torch.bfloat16) if name == "bf16-mixed" else nullcontext():
            for seed in range(2):
                step(model, optimizer, engine, rank, micro_batches, clipped, seed)
            with Allocations() as allocations:
                step(model, optimizer, engine, rank, micro_batches, clipped, 2)
            found[name] = list(allocations.found)
            # The mode works: it sees an allocation that engine code makes outside a step.
            with allocations:
                engine.units[0].values()
            assert [
                caller for nbytes, caller in allocations.found[len(found[name]) :] if nbytes >= 1024
            ] == ["full"]
    return found


def large(found):
    """Callers of those that are more than a few numbers: a bias's shard has 1 KiB."""
    return Counter(caller for nbytes, caller in found if nbytes >= 1024)


@pytest.mark.parametrize("world_size", [2, 4])
def test_on_the_cpu_gradients_alone(world_size):
    """Once for each unit, when its first gradients are reduced: before a loss is differentiated,
    when most memory is in use, they are freed.
    """
    for found in run_ranks(memory_of_a_step, world_size, False, timeout=60):
        assert {name: large(allocations) for name, allocations in found.items()} == dict.fromkeys(
            VARIANTS, Counter(room_for_gradients=BLOCKS)
        )
        nbytes = [nbytes for nbytes, _ in found["plain"] if nbytes >= 1024]
        assert nbytes == [UNIT_BYTES // world_size] * BLOCKS


def test_nothing_where_gradients_keep_their_memory():
    """As they do on a device. What is left are numbers: votes, and norms of runs of a flat
    gradient.
    """
    few, many = (
        run_ranks(memory_of_a_step, 2, True, "cpu", blocks) for blocks in (BLOCKS, 2 * BLOCKS)
    )
    for rank in range(2):
        for name in VARIANTS:
            assert not large(few[rank][name]) and not large(many[rank][name]), name
            counts = [len(found[rank][name]) for found in (few, many)]
            assert counts[0] == counts[1] <= 40, (name, counts)  # none for a unit


def test_nothing_on_one_rank():
    (found,) = run_ranks(memory_of_a_step, 1, True, timeout=60)
    assert {name: large(allocations) for name, allocations in found.items()} == dict.fromkeys(
        VARIANTS, Counter()
    )


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_on_a_gpu(world_size):
    for found in run_ranks(memory_of_a_step, world_size, True, "cuda", timeout=100):
        assert {name: large(allocations) for name, allocations in found.items()} == dict.fromkeys(
            VARIANTS, Counter()
        )
