"""`examples/profile_step.py` draws the phases of a step."""

import importlib.util
from pathlib import Path

from helpers.ranks import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "profile_step.py"


def run(rank, world_size, folder):
    spec = importlib.util.spec_from_file_location("profile_step", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    spans = example.main(folder, devices=world_size)
    return {name: [phase for phase, _, _ in phases] for name, phases in spans.items()}


def test_every_unit_has_its_phases_in_order(tmp_path):
    for found in run_ranks(run, 2, tmp_path, timeout=100):
        assert {"agreement", "AdamW", "wait for batch"} <= set(found)
        for unit in ("blocks.0", "blocks.1", "blocks.2", "blocks.3"):
            assert found[unit][:2] == ["unshard", "wait"]
            assert found[unit][-2:] == ["reduce", "wait for sums"]
    assert (tmp_path / "profile.png").stat().st_size > 10_000
    assert (tmp_path / "trace.json").stat().st_size > 10_000
