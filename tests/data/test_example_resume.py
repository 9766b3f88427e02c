"""The resume example, on ranks that are there already."""

import importlib.util
from pathlib import Path

import pytest

from helpers.ranks import run_ranks

FILE = Path(__file__).parents[2] / "examples" / "resume.py"


def run_example(rank, world, folder):
    spec = importlib.util.spec_from_file_location("resume_example", FILE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.compare(Path(folder), world)


@pytest.mark.parametrize("world", [1, 2])
def test_the_resumed_run_is_the_whole_run(world, tmp_path):
    run_ranks(run_example, world, str(tmp_path), timeout=40)
