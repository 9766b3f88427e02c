"""On a device what the other files count and compare on the CPU: one rank, and two that share it
with gloo between them.

`pytest -m gpu tests/ranks` runs this with all else here that has a variant for a device.
"""

import pytest
import torch

from helpers.contracts import (
    BLOCKS,
    IN_THE_SLOTS,
    ON_THE_WIRE,
    UNIT_BYTES,
    build,
    count_calls,
    micro_batch,
)
from helpers.ranks import run_ranks
from helpers.tracking import needs_cuda

pytestmark = [pytest.mark.gpu, needs_cuda]


def calls_of_a_step(rank, world_size):
    found = {}
    for name, options in {
        "fp32": {},
        "on the wire": ON_THE_WIRE,
        "in the slots": IN_THE_SLOTS,
    }.items():
        model, optimizer, engine = build(rank, world_size, device="cuda", **options)
        with torch.autocast("cuda", torch.bfloat16, enabled=name == "in the slots"):
            for step in range(3):
                counts = count_calls(engine.collectives) if step == 2 else {}
                micro_batch(model, engine, rank, step)
                optimizer.step()
                optimizer.zero_grad()
        found[name] = dict(counts), engine.pool.memory.nbytes, engine.reducer.buffer.nbytes
    return found


def test_exchanges_and_memory_of_two_ranks():
    gathers, both = 2 * BLOCKS - 2, 2 * UNIT_BYTES
    for found in run_ranks(calls_of_a_step, 2, timeout=100):
        for name, (calls, slots, reduce) in found.items():
            reductions = "reduce_scatter_in" if name == "on the wire" else "reduce_scatter"
            assert calls == {"all_gather": gathers, reductions: BLOCKS, "agree": 1}, name
            assert both / (2 if name == "in the slots" else 1) <= slots <= 1.01 * both
            assert both <= reduce <= 1.01 * both, (
                "one unit's gradients travel while the next one's come"
            )
