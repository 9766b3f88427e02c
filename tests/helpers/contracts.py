"""What the contracts are counted on: blocks of one size under an engine, and a communicator whose calls are
counted.
"""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WIDTH, BLOCKS = 64, 6
# One unit is one block: 2 * 4 * 64 * 64 weights and 5 * 64 biases, a multiple of 4 elements for
# each rank of two or four.
UNIT_BYTES = 4 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
# Gradients travel in bfloat16, and slots in it.
ON_THE_WIRE = {"reduce_dtype": torch.bfloat16}
IN_THE_SLOTS = {"slot_dtype": lambda name, parameter: torch.bfloat16}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


def build(
    rank: int,
    world_size: int,
    communicator: Any = None,
    *,
    device: str = "cpu",
    block: type[nn.Module] = Block,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    blocks: int = BLOCKS,
    tail: tuple[nn.Module, ...] = (),
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """The model, its optimizer and its engine on this rank."""
    from lightning_zero3.strategies.communicators import make_collectives
    from lightning_zero3.strategies.engine import Zero3Engine

    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(blocks)], *tail)
    built = optimizer(model.parameters(), lr=0.1)
    place = torch.device(device)
    communicator = communicator or make_collectives(dist.group.WORLD, place)
    return (
        model,
        built,
        Zero3Engine(
            model,
            [built],
            device=place,
            collectives=communicator,
            **{"unit_policy": [block], **options},
        ),
    )


def micro_batch(model: nn.Module, engine: Any, rank: int, seed: int) -> None:
    """Forward and backward on numbers of this rank's own."""
    batch = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * seed + rank))
    batch = batch.to(engine.device, engine.units[0].chunks[0].master_dtype)
    with engine.step():
        loss = model(batch).square().mean()
    with engine.backward():
        loss.backward()


def count_calls(communicator: Any) -> Counter[str]:
    """From here on every exchange that is asked of ``communicator``, by its name; not those that one of
    them is made of.
    """
    from lightning_zero3.strategies.collectives import LocalCollectives

    counts: Counter[str] = Counter()
    depth = 0

    def counted(name: str) -> Any:
        method = getattr(communicator, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if not depth:
                counts[name] += 1
            depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                depth -= 1

        return call

    names = [
        name
        for name, value in vars(LocalCollectives).items()
        if callable(value) and not name.startswith("_")
    ]
    assert {
        "all_gather",
        "reduce_scatter",
        "agree",
        "broadcast",
        "all_reduce",
        "all_gather_object",
        "meet",
    } <= set(names)
    for name in names:
        setattr(communicator, name, counted(name))
    return counts


class Allocations(TorchDispatchMode):
    """Operations that our code makes memory with: the bytes, and which function of ours asked."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            before = {
                t.untyped_storage().data_ptr() for t in _tensors([*args, *(kwargs or {}).values()])
            }
        out = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            new = sum(
                t.nbytes for t in _tensors(out) if t.untyped_storage().data_ptr() not in before
            )
        if new:
            # What runs in these is autograd, or an optimizer: they only hand the call on.
            handing = ("run_watched", "run_told", "wrapped")
            ours = [
                f
                for f in traceback.extract_stack()[:-1]
                if "/torch/" not in f.filename and f.name not in handing
            ]
            # there are none in autograd's thread of a device
            if ours and "/strategies/" in ours[-1].filename:
                self.found.append((new, ours[-1].name))
        return out


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.layout == torch.strided else []
    return [t for item in value for t in _tensors(item)] if isinstance(value, tuple | list) else []
