"""What a step may cost, counted: exchanges and their bytes, Python calls, copies. Allocations are
in test_allocations.py.
"""

import subprocess
import sys
import traceback
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.contracts import (
    BLOCKS,
    ON_THE_WIRE,
    UNIT_BYTES,
    WIDTH,
    Block,
    build,
    count_calls,
    micro_batch,
)
from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks


def exchanges(rank, world_size, micro_batches, **options):
    """(gathers, bytes gathered, reductions, bytes reduced) of one optimizer step after the
    first.
    """
    model, optimizer, engine = build(rank, world_size, **options)
    communicator, counts = engine.collectives, [0, 0, 0, 0]
    gather, reduce, swap = (
        communicator.all_gather,
        communicator.reduce_scatter,
        communicator.all_to_all,
    )

    def counted(exchange, at):
        def call(buffer, *args):
            counts[at] += 1
            counts[at + 1] += buffer.nbytes
            return exchange(buffer, *args)

        return call

    for step in range(3):
        if step == 2:
            communicator.all_gather, communicator.reduce_scatter, communicator.all_to_all = (
                counted(gather, 0),
                counted(reduce, 2),
                counted(swap, 2),
            )
        for micro in range(micro_batches):
            with engine.accumulate() if micro < micro_batches - 1 else nullcontext():
                micro_batch(model, engine, rank, micro_batches * step + micro)
        optimizer.step()
        optimizer.zero_grad()
    return counts


def once(rank, world_size, micro_batches):
    return exchanges(rank, world_size, micro_batches, reduce_once=True)


def in_bf16(rank, world_size, micro_batches):
    return exchanges(rank, world_size, micro_batches, **ON_THE_WIRE)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_exchanges_of_a_step(world_size, micro_batches):
    # Two units stay in the pool at each turn: the last two from forward to backward, and the first
    # two from a backward to the forward of the next micro-batch. Each of these saves two gathers of
    # the 2 * BLOCKS of a micro-batch.
    gathers = micro_batches * 2 * BLOCKS - 2 * micro_batches - 2 * (micro_batches - 1)
    reductions = micro_batches * BLOCKS
    expected = [gathers, gathers * UNIT_BYTES, reductions, reductions * UNIT_BYTES]
    assert run_ranks(exchanges, world_size, micro_batches) == [expected] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_exchanges_when_a_window_is_reduced_once(world_size):
    gathers = 3 * 2 * BLOCKS - 2 * 3 - 2 * 2
    expected = [gathers, gathers * UNIT_BYTES, BLOCKS, BLOCKS * UNIT_BYTES]
    assert run_ranks(once, world_size, 3) == [expected] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_reductions_in_bf16_have_half_the_bytes(world_size):
    gathers = 2 * BLOCKS - 2
    expected = [gathers, gathers * UNIT_BYTES, BLOCKS, BLOCKS * UNIT_BYTES / 2]
    assert run_ranks(in_bf16, world_size, 1) == [expected] * world_size


# ---- every call --------------------------------------------------------------------------------

GATHERS = 2 * BLOCKS - 2  # see test_exchanges_of_a_step
ONCE_THROUGH = {"all_gather": GATHERS, "reduce_scatter": BLOCKS, "agree": 1}
# Name -> what the engine is built with, micro-batches, all that is asked of the communicator in a step
# after the first.
STEPS = {
    "plain": (dict, 1, ONCE_THROUGH),
    "accumulation": (
        dict,
        3,
        {"all_gather": 3 * 2 * BLOCKS - 2 * 3 - 2 * 2, "reduce_scatter": 3 * BLOCKS, "agree": 3},
    ),
    "reduced once": (
        lambda: {"reduce_once": True},
        3,
        {"all_gather": 3 * 2 * BLOCKS - 2 * 3 - 2 * 2, "reduce_scatter": BLOCKS, "agree": 3},
    ),
    "bf16": (
        lambda: ON_THE_WIRE,
        1,
        {"all_gather": GATHERS, "reduce_scatter_in": BLOCKS, "agree": 1},
    ),
    # Buffers that changed come from rank 0, all in one message.
    "statistics": (
        lambda: {
            "tail": (nn.BatchNorm1d(WIDTH, affine=False), nn.BatchNorm1d(WIDTH, affine=False))
        },
        1,
        {**ONCE_THROUGH, "broadcast": 1},
    ),
}


def calls_of_a_step(rank, world_size):
    found = {}
    for name, (options, micro_batches, _) in STEPS.items():
        model, optimizer, engine = build(rank, world_size, **options())
        for step in range(3):
            counts = count_calls(engine.collectives) if step == 2 else {}
            for micro in range(micro_batches):
                with engine.accumulate() if micro < micro_batches - 1 else nullcontext():
                    micro_batch(model, engine, rank, micro_batches * step + micro)
            optimizer.step()
            optimizer.zero_grad()
        found[name] = dict(counts)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_call_of_the_communicator(world_size):
    expected = {name: calls for name, (_, _, calls) in STEPS.items()}
    assert run_ranks(calls_of_a_step, world_size) == [expected] * world_size


class Counted(pl.LightningModule):
    """Counts what is asked of the communicator, and of torch.distributed, in its third step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        self.calls, self.beside = {}, Counter()

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.counting, self.counted = (
                count_calls(self.trainer.strategy.engine.collectives),
                Counter(),
            )
            for name in (
                "all_reduce",
                "broadcast",
                "all_gather",
                "all_gather_object",
                "broadcast_object_list",
                "barrier",
            ):
                setattr(dist, name, self.noting(name, getattr(dist, name)))

    def noting(self, name, function):
        def call(*args, **kwargs):
            self.counted[name] += 1
            return function(*args, **kwargs)

        return call

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 2:
            self.calls, self.beside = dict(self.counting), dict(self.counted)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(3, WIDTH), batch_size=1)


def calls_of_a_trainer(rank, world_size):
    module = Counted()
    trainer(zero3(), world_size, gradient_clip_val=0.1).fit(module)
    return module.calls, module.beside


def test_every_call_of_a_step_of_the_trainer():
    # One more for the norm that gradients are clipped by, torch's all-reduce, and one in which ranks
    # agree whether any of them was asked to stop. Agreements go by shared memory.
    expected = {**ONCE_THROUGH, "agree": 1 + 1, "all_reduce": 1}, {"all_reduce": 1}
    assert run_ranks(calls_of_a_trainer, 2) == [expected] * 2


def written_bytes():
    """What this process has written to files and sockets; gloo sends with writev."""
    with open("/proc/self/io") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar"))


def sent(rank, world_size, kind):
    """Bytes that a rank really sends in a step of four micro-batches."""
    if kind == "ddp":
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(*[Block() for _ in range(BLOCKS)])
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        from lightning_zero3.strategies.collectives import ComparedCollectives

        options = ON_THE_WIRE if kind == "bf16" else {"reduce_once": kind == "once"}
        model, optimizer, engine = build(
            rank, world_size, ComparedCollectives(dist.group.WORLD), **options
        )
    for step in range(3):
        dist.barrier()
        before = written_bytes()
        for micro in range(4):
            if kind == "ddp":
                with model.no_sync() if micro < 3 else nullcontext():
                    model(torch.randn(3, WIDTH)).square().mean().backward()
            else:
                with engine.accumulate() if micro < 3 else nullcontext():
                    micro_batch(model, engine, rank, 4 * step + micro)
        optimizer.step()
        optimizer.zero_grad()
    return written_bytes() - before


@pytest.mark.skipif(
    not Path("/proc/self/io").exists(), reason="counts what Linux says a process has written"
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_of_an_accumulation_window(world_size):
    total, share = BLOCKS * UNIT_BYTES, (world_size - 1) / world_size
    gathers = (4 * 2 * BLOCKS - 2 * 4 - 2 * 3) * UNIT_BYTES * share
    ddp, once, each, bf16 = (
        max(run_ranks(sent, world_size, kind)) for kind in ("ddp", "once", "each", "bf16")
    )
    overhead = 1.02  # labels, votes, and gloo's own headers
    # an all-reduce: a reduce-scatter and a gather
    assert 2 * total * share <= ddp <= overhead * 2 * total * share
    assert gathers + total * share <= once <= overhead * (gathers + total * share)
    assert gathers + 4 * total * share <= each <= overhead * (gathers + 4 * total * share)
    # as many messages as of `each`, so the same labels and headers; gradients have half the bytes
    assert each - bf16 == 2 * total * share
    assert once <= ddp + gathers < each


def runs_engine(file):
    return any(
        f"/strategies/{room}/" in file for room in ("engine", "collectives", "communicators")
    )


def copies_of_a_step(rank, world_size, shared):
    """Bytes that engine code copies in a step after the first, without the optimizer's."""
    from lightning_zero3.strategies.collectives import ComparedCollectives

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal copied
            callers = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
            ours = func is torch.ops.aten.copy_.default and runs_engine(callers[-1].filename)
            copied += args[0].nbytes if ours and args[0].dtype != torch.int64 else 0  # int64: votes
            return func(*args, **(kwargs or {}))

    copied = 0
    model, optimizer, engine = build(
        rank, world_size, None if shared else ComparedCollectives(dist.group.WORLD)
    )
    for step in range(3):
        with Copies() if step == 2 else nullcontext():
            micro_batch(model, engine, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    return copied


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_copied_in_a_step(world_size):
    # For a gather a rank puts its shard into the slot, and nothing is copied after; each gradient
    # is copied once, into the reduce buffer. In shared memory the copy of the other shards is the
    # exchange itself.
    gathers, reductions = 2 * BLOCKS - 2, BLOCKS
    shards, gradients = gathers * UNIT_BYTES // world_size, reductions * UNIT_BYTES
    assert run_ranks(copies_of_a_step, world_size, False) == [shards + gradients] * world_size
    assert (
        run_ranks(copies_of_a_step, world_size, True)
        == [shards * world_size + gradients] * world_size
    )


CALLS = """
import gc, re, sys, torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine
from lightning_zero3.strategies.numerics.precision import gather_dtypes

kind = sys.argv[1]
precision = kind if kind == "bf16-mixed" else "32-true"
autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())

class Block(nn.Module):  # nine parameters, as in a Llama block
    def __init__(self, d=16):
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(d), nn.RMSNorm(d)])
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(d, 4 * d, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        h = self.norms[0](x)
        q, k, v = self.q(h)[:, None], self.k(h)[:, None], self.v(h)[:, None]
        x = x + self.o(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0])
        h = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))

def counts(layers, sharded):  # Python calls of a step, and lines that the engine runs
    model, x = nn.Sequential(*[Block() for _ in range(layers)]), torch.randn(2, 4, 16)
    groups = [{"params": block.parameters()} for block in model] if kind == "a group each" else model.parameters()
    optimizer, device = torch.optim.SGD(groups, lr=0.1), torch.device("cpu")
    dtypes = gather_dtypes(model, precision, ())
    engine = Zero3Engine(model, [optimizer], device=device, collectives=make_collectives(dist.group.WORLD, device),
                         unit_policy=["Block"], slot_dtype=lambda name, p: dtypes.get(name, p.dtype)) if sharded else None
    def step():
        if engine is None:
            with autocast:
                loss = model(x).sum()
            loss.backward()
            return
        with engine.step(), autocast:
            loss = model(x).sum()
        with engine.backward():
            loss.backward()
    for _ in range(3):
        step()
        optimizer.zero_grad()
    calls = lines = 0
    def profile(frame, event, argument):
        nonlocal calls
        calls += event == "call"
    def trace(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return trace if re.search("/strategies/engine/", frame.f_code.co_filename) else None
    gc.collect()  # of the models before, whose tensors call back
    sys.setprofile(profile)
    step()
    sys.setprofile(None)
    optimizer.zero_grad()
    sys.settrace(trace)
    step()
    sys.settrace(None)
    return calls, lines

plain, ours = ([counts(layers, sharded) for layers in (3, 5, 7)] for sharded in (False, True))
print((ours[2][0] - ours[0][0] - plain[2][0] + plain[0][0]) / 4)
print(*(more[1] - less[1] for less, more in zip(ours, ours[1:])))
"""


# Python calls that a unit of nine parameters adds to a step, at most 150. FSDP2 adds 1223 in fp32
# (torch 2.13).
MOST_CALLS = {"fp32": 131, "a group each": 131, "bf16-mixed": 140}


def python_calls(kind):
    """Calls of a step that a unit adds, and lines that the engine runs for two more units, of three
    and of five.
    """
    done = subprocess.run(
        [sys.executable, "-c", CALLS, kind], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    calls, *lines = map(float, done.stdout.split())
    return calls, lines


@pytest.mark.parametrize("kind", MOST_CALLS)
def test_python_calls_per_unit_and_step(kind):
    calls, lines = python_calls(kind)
    # 68 are autograd asking about each tensor it saves and reads.
    assert calls <= MOST_CALLS[kind]
    # Two units more cost the same whether there are three or five: nothing looks at all units, or
    # at all param groups, for each unit or saved tensor.
    assert lines[0] == lines[1]
