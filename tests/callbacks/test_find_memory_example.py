"""The example finds what it plants, and finds nothing where nothing is planted."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from helpers.ranks import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "find_memory.py"


def run_example(rank, world_size, healthy, folder):
    spec = importlib.util.spec_from_file_location("find_memory", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["find_memory"] = module
    spec.loader.exec_module(module)
    tracker = module.find(healthy, steps=250, output=folder)
    return tracker.leaks, tracker.run_spreads["memory/fragmentation"].high


@pytest.mark.parametrize("healthy", [False, True])
def test_the_example(healthy, tmp_path):
    ((leaks, fragmentation),) = run_ranks(run_example, 1, healthy, tmp_path)
    assert (tmp_path / "memory.html").exists()
    if healthy:
        assert leaks == [] and fragmentation < 0.1
    else:
        assert re.search(
            r"0\.\d+ MiB per step:\n  \d+ more float32\[512, 256\].*Faulty\.history", leaks[0]
        )
        assert fragmentation > 0.15
