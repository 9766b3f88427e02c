"""Flat gradients, whose memory is new in each step, lie in large pages, as the kernel lists
them.
"""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from helpers.ranks import run_ranks
from lightning_zero3.strategies.engine.huge_pages import advise_huge_pages
from ranks import test_memory

pytestmark = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="the kernel has pages of one size only",
)


def is_advised(address):
    """Whether the mapping with ``address`` was advised to have huge pages ("hg" in the manual of
    proc).
    """
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"nothing is mapped at {address:x}")


def gradients(rank, world_size):
    # above 4 MiB: whatever its address, its middle is in a whole page
    with patch.object(test_memory, "VOCAB", 4000):
        training = test_memory.Training(rank)
    for _ in range(2):
        training.step()
    training.backward()
    grads = [group.grad for group in training.engine.groups if group.trained]
    return [is_advised(grad.data_ptr() + grad.nbytes // 2) for grad in grads]


def test_gradients():
    assert run_ranks(gradients, 2, timeout=60) == [[True], [True]]


def test_nothing_but_whole_pages_inside():
    memory = torch.empty(64 << 20, dtype=torch.uint8)  # of a mapping of its own
    few = memory[(8 << 20) + 7 : (12 << 20) + 7]
    advise_huge_pages(few)
    first = few.data_ptr()
    assert is_advised(first + (2 << 20))
    assert not is_advised(first - 1) and not is_advised(first + few.nbytes)
    advise_huge_pages(memory[:4096])
    assert not is_advised(memory.data_ptr())
