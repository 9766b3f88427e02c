"""Bytes that offload takes on host and device, and that travel in a step, against formulas.

Per rank, with Ψ trained parameters, N ranks, units of ψ, Adam, and 16-bit weights beside fp32
masters. On the host 18Ψ/N: master values, gradients and two moments of 4 bytes, rounded values of 2.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Offload, Zero3Engine
from lightning_zero3.strategies.optimizers.param_groups import ParamGroups
from offload.late_device import LateStream, LateWorker

CPU = torch.device("cpu")
UNITS, WIDTH, RANKS = 30, 64, 2
OF_A_UNIT = WIDTH * WIDTH + WIDTH
TRAINED = UNITS * OF_A_UNIT
NEAR = 0.02


def build(where, frozen=0):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS + frozen)))
    for layer in model[:frozen]:
        layer.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    engine = Zero3Engine(
        model,
        [optimizer],
        device=CPU,
        collectives=make_collectives(dist.group.WORLD, CPU),
        unit_policy=list,
        slot_dtype=lambda name, p: torch.bfloat16,
        offload=where,
        streams=LateStream,
        worker=LateWorker,
    )
    ParamGroups([optimizer], lambda: engine, CPU).start(engine)
    return engine, optimizer, model


class Transfers(TorchDispatchMode):
    """Bytes that are copied from and to the memory of a host."""

    def __init__(self, host):
        super().__init__()
        self.slab = host.memory.take(0, torch.uint8).untyped_storage().data_ptr()
        self.to_device = self.to_host = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            target, source = (t.untyped_storage().data_ptr() == self.slab for t in args[:2])
            if source and not target:
                self.to_device += args[0].nbytes
            if target and not source:
                self.to_host += args[1].nbytes
        return func(*args, **(kwargs or {}))


def step(engine, optimizer, model, micro=1):
    for _ in range(micro):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with engine.step():
                loss = model(torch.ones(2, WIDTH)).float().square().mean()
            with engine.backward():
                loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def count(rank, world_size):
    found = {}
    for kind in ("optimizer", "parameters"):
        for micro in (1, 2):
            engine, optimizer, model = build(Offload(kind), frozen=2 if micro == 1 else 0)
            step(engine, optimizer, model, micro)
            with Transfers(engine.host) as transfers:
                step(engine, optimizer, model, micro)
            state = engine.steps[optimizer].state.values()
            found[kind, micro] = {
                "to device": transfers.to_device,
                "to host": transfers.to_host,
                "host": engine.host.nbytes
                + sum(s[k].nbytes for s in state for k in s if "exp" in k),
                "device": engine.pool.memory.nbytes
                + engine.reducer.buffer.nbytes
                + sum(
                    t.nbytes
                    for unit in engine.units
                    for chunk in unit.chunks
                    for t in chunk.shards()
                    if t.untyped_storage().data_ptr() != transfers.slab
                ),
            }
    return found


@pytest.fixture(scope="module")
def counted():
    return run_ranks(count, RANKS, timeout=100)


def test_bytes(counted):
    for found in counted:
        for kind in ("optimizer", "parameters"):
            host = 18 * TRAINED / RANKS
            assert found[kind, 2]["host"] == pytest.approx(host, rel=NEAR)
            # two unsharded units, two of fp32 gradients, and where a unit's sums are added
            device = 2 * 2 * OF_A_UNIT + 2 * 4 * OF_A_UNIT + 4 * OF_A_UNIT / RANKS
            device += 2 * TRAINED / RANKS if kind == "optimizer" else 0
            assert found[kind, 2]["device"] == pytest.approx(device, rel=NEAR)


def test_transfers(counted):
    """Of 16-bit values; of fp32 gradients, for each micro-batch, and back for each later one."""
    for found in counted:
        for micro in (1, 2):
            sums = 4 * TRAINED / RANKS * micro
            assert found["optimizer", micro]["to host"] == pytest.approx(sums, rel=NEAR)
            assert found["parameters", micro]["to host"] == pytest.approx(sums, rel=NEAR)
            back = 4 * TRAINED / RANKS * (micro - 1)
            once = 2 * TRAINED / RANKS + back
            assert found["optimizer", micro]["to device"] == pytest.approx(once, rel=NEAR)
            # a forward, in which frozen units come, too, and a backward, which does not reach them;
            # at each turn between the two, and between micro-batches, two units are there
            frozen = 2 if micro == 1 else 0
            passes = micro * (2 * UNITS + frozen) - 2 * (2 * micro - 1)
            each = passes * 2 * OF_A_UNIT / RANKS + back
            assert found["parameters", micro]["to device"] == pytest.approx(each, rel=NEAR)


def fill(rank, world_size, budget):
    """Bytes of model state on the device, as with Adam, and units there, from the first."""
    engine, *_ = build(Offload("parameters", budget))
    there = [not unit.hosted for unit in engine.units]
    chunks = [chunk for unit in engine.units if not unit.hosted for chunk in unit.chunks]
    return sum(16 * chunk.layout.shard_numel for chunk in chunks), there


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_budget_is_filled_from_the_first_unit(part):
    budget = int(part * 16 * TRAINED / RANKS)
    for nbytes, there in run_ranks(fill, RANKS, budget, timeout=60):
        assert budget - 16 * OF_A_UNIT / RANKS < nbytes <= budget
        assert there == sorted(there, reverse=True)
