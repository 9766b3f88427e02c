"""The resume example, with the tests' own strategy in place of the engine."""

import importlib.util
from pathlib import Path

import pytest
from data.trainers import SharedData

from helpers.ranks import run_ranks
from lightning_zero3.strategies.data import DataOptions

pytestmark = pytest.mark.timeout(60)
FILE = Path(__file__).parents[2] / "examples" / "resume.py"


def run_example(rank, world, folder):
    spec = importlib.util.spec_from_file_location("resume_example", FILE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.compare(Path(folder), world, lambda: SharedData(DataOptions(seed=1)))


@pytest.mark.parametrize("world", [1, 2])
def test_the_resumed_run_is_the_whole_run(world, tmp_path, capfd):
    run_ranks(run_example, world, str(tmp_path), timeout=40)
