"""The example runs as it stands, and shows what it says; so does the table of equality."""

import importlib.util
import logging
from pathlib import Path

import pytest

from graphs.make_table import CASES, STRATEGIES, TABLE, line, row
from helpers.tracking import needs_cuda

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cuda_graph.py"


def load():
    spec = importlib.util.spec_from_file_location("cuda_graph_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("options", "replayed"),
    [
        ({"optimizer": True}, "the training step: 6 of 13 runs replayed, 3 verified\n  the opt"),
        ({"strategy": "zero3"}, "the training step: 6 of 13 runs replayed, 3 verified"),
        (
            {"refused": True, "modules": ["model"]},
            "module 'model': 6 of 13 runs replayed, 3 verified",
        ),
    ],
    ids=["optimizer", "zero3", "modules"],
)
def test_the_captured_run_is_the_eager_run(options, replayed, device, capsys, caplog):
    with caplog.at_level(logging.INFO):
        load().compare(epochs=1, accelerator=device, **options)
    assert "the same weights and the same 3 logged values" in capsys.readouterr().out
    assert f"CUDAGraphStep:\n  {replayed}" in caplog.text


def test_the_refused_step_is_named(device):
    example = load()
    with pytest.warns(
        UserWarning,
        match=r"(?s)cannot be captured.*cuda_graph\.py:\d+: `if self\.refused and loss\.item\(\)",
    ):
        example.fit(
            example.CUDAGraphStep(software=True), epochs=1, refused=True, accelerator=device
        )


def test_the_table_has_all_cases_and_no_difference():
    text = TABLE.read_text()
    assert all(text.count(f"\n| {case} | equal |") == len(STRATEGIES) for case in CASES)
    assert "differ" not in text and "| 0 of " not in text


# On the CPU one line is made again; on a GPU all of one rank.
ONE_RANK = [
    (setup, case) for setup, (devices, _) in STRATEGIES.items() if devices == 1 for case in CASES
]
AGAIN = [
    ("cpu", "zero3, one rank", "resume in the middle of an epoch"),
    *(pytest.param("cuda", *each, marks=[pytest.mark.gpu, needs_cuda]) for each in ONE_RANK),
]


@pytest.mark.parametrize(("device", "setup", "case"), AGAIN, indirect=["device"])
def test_a_line_of_the_table_comes_out_again(device, setup, case, tmp_path):
    devices, strategy = STRATEGIES[setup]
    _, found, text = TABLE.read_text().partition(f"## {setup[0].upper()}{setup[1:]}\n")
    assert (
        found
        and text.partition("\n## ")[0].count(line(case, row(case, strategy, devices, tmp_path)))
        == 1
    )
