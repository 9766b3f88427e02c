"""The example runs as it stands, and shows what it says; so does the table of equality."""

import importlib.util
from pathlib import Path

import pytest
from graphs.make_table import CASES, STRATEGIES, TABLE

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cuda_graph.py"


def load():
    spec = importlib.util.spec_from_file_location("cuda_graph_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "options",
    [{"optimizer": True}, {"strategy": "zero3"}, {"refused": True, "modules": ["model"]}],
    ids=["optimizer", "zero3", "modules"],
)
def test_the_captured_run_is_the_eager_run(options, capsys):
    load().compare(epochs=1, **options)
    assert "the same weights and the same 3 logged values" in capsys.readouterr().out


def test_the_refused_step_is_named():
    example = load()
    with pytest.warns(UserWarning, match=r"(?s)cannot be captured.*cuda_graph\.py:\d+: `if self\.refused and loss\.item\(\)"):
        example.fit(example.CUDAGraphStep(software=True), epochs=1, refused=True)


def test_the_table_has_all_cases_and_no_difference():
    text = TABLE.read_text()
    assert all(text.count(f"\n| {case} | equal |") == len(STRATEGIES) for case in CASES)
    assert "differ" not in text and "| 0 of " not in text
