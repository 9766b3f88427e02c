"""Bytes that a rank holds, counted over all live tensor storages of the process, against the ZeRO
formula.
"""

import gc
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.models import Block
from helpers.ranks import run_ranks
from helpers.tracking import needs_cuda
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine

WIDTH, DEPTH, VOCAB = 256, 4, 2000
UNITS = [["embed"], *([f"blocks.{k}"] for k in range(DEPTH)), ["norm", "head"]]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def policy(model):
    return [[model.get_submodule(name) for name in names] for names in UNITS]


def in_bfloat16(name):
    """Linear layers, which autocast runs in bfloat16; norms and embeddings it does not."""
    return "norm" not in name and "embed" not in name


def live_storages():
    """Address -> bytes of every tensor storage that Python can reach."""
    gc.collect()
    found = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided:
                storage = thing.untyped_storage()
                if storage.nbytes() > 8:  # else the one number of a sharded parameter
                    found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def shared_memory():
    """(start, stop, rank whose it is) of every mapping of memory that ranks share, as the kernel
    lists them.
    """
    pattern = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .* /memfd:lightning_zero3 rank (\d+) ")
    found = map(pattern.match, Path("/proc/self/maps").read_text().splitlines())
    return [(int(m[1], 16), int(m[2], 16), int(m[3])) for m in found if m]


class Training:
    """The model under the engine.

    Args:
        frozen: dtype of the linear layers in blocks, which are not trained then.
        mixed: compute under autocast, with linear layers gathered in bfloat16.
    """

    def __init__(self, rank, frozen=None, mixed=False, device="cpu"):
        torch.manual_seed(rank)
        self.model, self.device = Model(), torch.device(device)
        if frozen is not None:
            for module in self.model.blocks.requires_grad_(False).modules():
                if isinstance(module, nn.Linear):  # autocast leaves norms in fp32
                    module.to(frozen)
        self.autocast = (
            torch.autocast(device, torch.bfloat16)
            if mixed or frozen == torch.bfloat16
            else nullcontext()
        )
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad])
        self.engine = Zero3Engine(
            self.model,
            [self.optimizer],
            device=self.device,
            collectives=make_collectives(dist.group.WORLD, self.device),
            unit_policy=policy,
            slot_dtype=lambda name, p: torch.bfloat16 if mixed and in_bfloat16(name) else p.dtype,
        )
        self.tokens = torch.arange(rank, rank + 2, device=device)

    def backward(self):
        with self.engine.step(), self.autocast:
            loss = self.model(self.tokens).float().square().mean()
        with self.engine.backward():
            loss.backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def count(rank, world_size, options):
    before = set(live_storages())
    training = Training(rank, **options)
    for _ in range(2):
        training.step()
    engine = training.engine
    storages = {
        address: nbytes for address, nbytes in live_storages().items() if address not in before
    }
    scratch = {
        "reduce": engine.reducer.buffer,
        "staging": getattr(engine.collectives, "_staging", torch.empty(0)),
    }
    sizes = {
        name: storages.pop(tensor.untyped_storage().data_ptr(), 0)
        for name, tensor in scratch.items()
    }
    pool = engine.pool.memory.untyped_storage()  # storages of slots are parts of it
    sizes["slots"], whole = (
        pool.nbytes(),
        range(pool.data_ptr(), pool.data_ptr() + pool.nbytes()),
    )
    storages = {address: nbytes for address, nbytes in storages.items() if address not in whole}
    storages.pop(training.tokens.untyped_storage().data_ptr())
    owners = {
        address: owner
        for address in storages
        for low, high, owner in shared_memory()
        if low <= address < high
    }
    sizes["flags"] = sum(storages[address] for address, owner in owners.items() if owner == rank)
    # Memory of other ranks is mapped here, and counted there.
    return sum(nbytes for address, nbytes in storages.items() if address not in owners), sizes


def unit_sizes(nbytes):
    """Of each unit: the bytes of its parameters, one of which takes ``nbytes(name)``."""
    model = Model()
    return [
        sum(
            nbytes(f"{n}.{k}") * p.numel()
            for n in names
            for k, p in model.get_submodule(n).named_parameters()
        )
        for names in UNITS
    ]


def check_state(found, world_size, mixed, ends=1):
    numels = unit_sizes(lambda name: 1)
    slots = unit_sizes(lambda name: 2 if mixed and in_bfloat16(name) else 4)
    pairs = [
        max(a + b for a, b in zip(sizes, sizes[1:], strict=False))
        for sizes in (slots, [4 * n for n in numels])
    ]
    for rank, (state, scratch) in enumerate(found):
        ratio = state / (16 * sum(numels) / world_size)
        print(
            f"rank {rank} of {world_size}: {state} bytes, {ratio:.5f} of 16 * {sum(numels)} /"
            f" {world_size}; {scratch}"
        )
        assert 0.999 <= ratio <= 1.001  # optimizers keep nothing of padding
        if world_size == 1:  # parameters view their shards
            assert scratch["slots"] == 0
        else:  # neighbours: one in use, one unsharded ahead
            assert 1.0 <= scratch["slots"] / pairs[0] <= 1.001
        # One unit's gradients in fp32; two where their reduction overlaps the next unit's backward.
        assert 1.0 <= scratch["reduce"] / (4 * max(numels) if ends == 1 else pairs[1]) <= 1.001
        # What is gathered and added up is read where it lies.
        assert scratch["staging"] == 0
        assert scratch["flags"] <= 80 * 1024


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("mixed", [False, True])
def test_state_is_16_bytes_per_parameter_over_the_ranks(mixed, world_size):
    check_state(run_ranks(count, world_size, {"mixed": mixed}, timeout=60), world_size, mixed)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mixed", [False, True])
def test_state_on_a_gpu(mixed, world_size):
    check_state(
        run_ranks(count, world_size, {"mixed": mixed, "device": "cuda"}, timeout=100),
        world_size,
        mixed,
        ends=2,
    )


def frozen_bytes(dtype):
    """Of all ranks, where the blocks keep their values alone."""
    model = Model()
    whole = dict.fromkeys(model.parameters(), 16) | dict.fromkeys(model.blocks.parameters(), 4)
    low = {
        p: dtype.itemsize
        for m in model.blocks.modules()
        if isinstance(m, nn.Linear)
        for p in m.parameters()
    }
    return sum(nbytes * p.numel() for p, nbytes in (whole | low).items())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("frozen", [torch.float32, torch.bfloat16])
def test_frozen_parameters_cost_their_own_bytes(frozen, world_size):
    expected = frozen_bytes(frozen) / world_size
    for state, _ in run_ranks(count, world_size, {"frozen": frozen}, timeout=60):
        assert 1.0 <= state / expected <= 1.001


def most_in_a_backward(rank, world_size, options):
    """The most bytes that the allocator had given out at once in a forward and backward, over those
    before.
    """
    training = Training(rank, **options)
    for _ in range(2):
        training.step()
    for chunk in training.engine.gradients.chunks:
        chunk.gradients = None  # as the backward would
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        training.backward()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return now, most


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_gradient_at_a_time(world_size):
    """Of activations there is next to nothing here, and slots and the reduce buffer are there from
    the start.
    """
    model = Model()
    # of gradients, which are freed between the steps
    shards = 4 * sum(p.numel() for p in model.parameters()) / world_size
    largest = 4 * max(p.numel() for p in model.parameters())
    # of two tokens: less than the smallest weight
    activations = 4 * 2 * (2 * VOCAB + DEPTH * 20 * WIDTH)
    assert activations < 4 * min(p.numel() for p in model.parameters() if p.ndim > 1)
    for now, most in run_ranks(most_in_a_backward, world_size, {}, timeout=60):
        assert 1.0 <= now / shards <= 1.001 + activations / shards
        assert max(shards, largest) <= most <= 1.001 * shards + largest + activations
