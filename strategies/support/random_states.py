"""States of the random generators: capture, restore, derive.

Four generators count: python's ``random``, numpy's global one, torch's CPU generator and the
current CUDA device's. A state consists of tensors and numbers only, so that ``torch.load`` reads it
with ``weights_only=True``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

State = dict[str, Any]
_MASK = (1 << 64) - 1


def derive_seed(*keys: int) -> int:
    """Mix integers into one seed of 63 bits (splitmix64; equal on every platform and process)."""
    state = 0
    for key in keys:
        state = (state + 0x9E3779B97F4A7C15 + (key & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_all(seed: int) -> None:
    """Seed all generators; the current CUDA device's only if CUDA is in use already."""
    seed_cpu(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed(seed)


def seed_cpu(seed: int) -> None:
    """Seed python, numpy and torch's CPU generator."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not torch.manual_seed, which also seeds every accelerator backend, at 100 times the cost.
    torch.default_generator.manual_seed(seed)


def seed_rank(seed: int, rank: int) -> None:
    """Give each rank a dropout and augmentation stream of its own, reproducible from the seed.

    Call it after the initialisation of the weights, which needs equal generators on all ranks. Rank
    0 keeps its generators, so that a run on one rank draws the same numbers as without zero3.
    """
    if rank > 0:
        seed_all(derive_seed(seed, rank))


def capture() -> State:
    """Return the states of all generators of this process; takes microseconds."""
    cuda = {"cuda": torch.cuda.get_rng_state()} if _cuda_in_use() else {}
    return {**capture_cpu(), **cuda}


def capture_cpu() -> State:
    """Return the states of python's, numpy's and torch's CPU generator."""
    _, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        # The keys as integers, because torch.load refuses numpy arrays by default.
        "numpy": [np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
    }


def restore(state: State) -> None:
    """Set every generator of ``state`` to the state that it had."""
    random.setstate(state["python"])
    keys, *rest = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def scoped(seed: int | None = None) -> Iterator[None]:
    """Run a block, seeded or not, that leaves python's, numpy's and torch's CPU state untouched."""
    before = capture_cpu()
    try:
        if seed is not None:
            seed_cpu(seed)
        yield
    finally:
        restore(before)


def gather_states() -> list[State]:
    """Return the states of all ranks, in rank order, on every rank. Collective."""
    if not dist.is_initialized():
        return [capture()]
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, capture())
    return states


def restore_rank(states: Sequence[State], rank: int, seed: int, step: int) -> None:
    """Restore this rank's state, or seed it from ``seed`` and ``step`` if ``states`` has none."""
    if rank < len(states):
        restore(states[rank])
    else:
        seed_all(derive_seed(seed, rank, step))


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()
