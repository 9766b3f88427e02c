"""The table of targets at the end of a benchmark's results, on made-up figures."""

import copy
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import train

sys.path.pop()  # modules there are called as folders of tests are

BASE = {
    "step_ms": 100.0,
    "ratio": 1.0,
    "over_fsdp2": 0.6,
    "peak_mb": 10.0,
    "first_step_s": 4.0,
    "loss_difference": 0.0,
}
WORSE = {
    "loss_difference": 2e-5,
    "ratio": 1.3,
    "over_fsdp2": 1.1,
    "peak_mb": 11.0,
    "first_step_s": 4.3,
}


def missed(rows, kind, added):
    found = train.against_targets({"small": {"plain": rows}}, added, kind)
    return [measure for _, measure, value, target in found if value > target]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_each_target_can_be_missed(kind):
    rows = {entry: dict(BASE) for entry in train.ENTRIES[kind]}
    added = {train.PEER: 10.0, train.BY_BLOCK: 3.0}
    assert missed(rows, kind, added) == []
    for key, value in WORSE.items():
        other = copy.deepcopy(rows)
        other[train.MINE][key] = value
        assert len(missed(other, kind, added)) == 1, key
    assert len(missed(rows, kind, added | {train.BY_BLOCK: 4.0})) == 1


def test_an_entry_that_failed_is_not_judged():
    rows = {entry: dict(BASE) for entry in train.ENTRIES["cpu"]} | {
        train.MINE: {"error": "RuntimeError: no"}
    }
    assert train.against_targets({"small": {"plain": rows}}, {}, "cpu") == []
