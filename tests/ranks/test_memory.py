"""Bytes that a rank holds, counted over all live tensor storages of the process, against the ZeRO formula."""

import gc
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.models import Block
from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import make_collectives
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


def live_storages():
    """Address -> bytes of every tensor storage that Python can reach."""
    gc.collect()
    found = {}
    with torch._C.DisableTorchFunctionSubclass():
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and thing.layout == torch.strided:
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def shared_memory():
    """(start, stop, rank whose it is) of every mapping of memory that ranks share, as the kernel lists them."""
    pattern = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .* /memfd:lightning_zero3 rank (\d+) ")
    found = map(pattern.match, Path("/proc/self/maps").read_text().splitlines())
    return [(int(m[1], 16), int(m[2], 16), int(m[3])) for m in found if m]


def count(rank, world_size, frozen):
    torch.manual_seed(rank)
    before = set(live_storages())
    model = Model()
    if frozen:
        model.blocks.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    cpu = torch.device("cpu")
    engine = Zero3Engine(
        model, [optimizer], device=cpu, collectives=make_collectives(dist.group.WORLD, cpu), unit_policy=policy
    )
    for _ in range(2):
        with engine.step():
            loss = model(torch.arange(rank, rank + 8)).square().mean()
        with engine.backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del loss
    storages = {address: nbytes for address, nbytes in live_storages().items() if address not in before}
    scratch = {
        "slots": engine.arena.memory,
        "reduce": engine.reducer.buffer,
        "staging": getattr(engine.collectives, "_staging", torch.empty(0)),
    }
    sizes = {name: storages.pop(tensor.untyped_storage().data_ptr(), 0) for name, tensor in scratch.items()}
    owners = {address: owner for address in storages for low, high, owner in shared_memory() if low <= address < high}
    sizes["boards"] = sum(storages[address] for address, owner in owners.items() if owner == rank)
    # Memory of other ranks is mapped here, and counted there.
    return sum(nbytes for address, nbytes in storages.items() if address not in owners), sizes


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_state_is_16_bytes_per_parameter_over_the_ranks(world_size):
    model = Model()
    numels = [sum(p.numel() for n in names for p in model.get_submodule(n).parameters()) for names in UNITS]
    total = sum(numels)
    for rank, (state, scratch) in enumerate(run_ranks(count, world_size, False, timeout=60)):
        ratio = state / (16 * total / world_size)
        print(f"rank {rank} of {world_size}: {state} bytes, {ratio:.5f} of 16 * {total} / {world_size}; {scratch}")
        assert 1.0 <= ratio <= 1.001
        if world_size == 1:
            assert scratch == {"slots": 0, "reduce": 0, "staging": 0, "boards": 0}
            continue
        neighbours = 4 * max(a + b for a, b in zip(numels, numels[1:], strict=False))
        assert 1.0 <= scratch["slots"] / neighbours <= 1.001
        assert 1.0 <= scratch["reduce"] / (4 * max(numels)) <= 1.001
        # What is gathered and added up is read where it lies.
        assert scratch["staging"] == 0
        assert scratch["boards"] <= 80 * 1024


@pytest.mark.parametrize("world_size", [1, 2])
def test_frozen_parameters_cost_four_bytes(world_size):
    model = Model()
    total = sum(p.numel() for p in model.parameters())
    frozen = sum(p.numel() for p in model.blocks.parameters())
    expected = (16 * (total - frozen) + 4 * frozen) / world_size
    for state, _ in run_ranks(count, world_size, True, timeout=60):
        assert 1.0 <= state / expected <= 1.001
