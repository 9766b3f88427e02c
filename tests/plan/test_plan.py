"""What `plan` says of a training, and what the training then has."""

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_zero3.callbacks.memory.ledger import STRATEGY_CATEGORIES
from lightning_zero3.strategies.plan import run
from plan.grid import GRID, Case, compare, plan, table

TABLE = Path(__file__).parents[2] / "docs" / "PLAN.md"
OTHERS = [
    Case("wide", optimizer="loop"),  # its step takes memory for a moment
    Case("wide", optimizer="muon"),
    Case("transformer", accumulate=2),  # gradients are there in the second forward
]


def check(devices, cases):
    rows = compare(devices, cases)
    for case, row in zip(cases, rows, strict=True):
        assert row.state_measured > 1e6 and row.most_measured > row.state_measured / 2
        assert abs(row.state / row.state_measured - 1) < 0.03, case
        assert abs(row.most / row.most_measured - 1) < 0.1, case
    return rows


def test_two_ranks():
    check(2, [GRID[0], GRID[10], GRID[26]])


def test_other_options():
    check(2, OTHERS)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_grid(devices):
    """The table has the same plans; what was measured may differ by a processor's kernels."""
    found = table(devices, check(devices, GRID))
    kept = [line for line in TABLE.read_text().splitlines() if line.startswith(f"| {devices} |")]
    plans = [[line.split("|")[at] for at in (1, 2, 3, 4, 5, 8)] for line in found]
    assert plans == [[line.split("|")[at] for at in (1, 2, 3, 4, 5, 8)] for line in kept]


SCRIPT = """
import sys
import torch
from lightning.pytorch import Trainer
import lightning_zero3
from plan.grid import Model

class Asks(Model):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else None

kind = Asks if "--asks" in sys.argv else Model
Trainer(strategy="zero3", devices=2, accelerator="cpu", logger=False).fit(kind("wide", None, "fused"))
print("trained")
"""


@pytest.fixture
def tell(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*arguments):
        command = [sys.executable, "-m", "lightning_zero3", "plan", *arguments]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=100,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )
        assert "trained" not in done.stdout
        return done.returncode, done.stdout, done.stderr

    return run


def test_what_fits(tell):
    code, text, _ = tell("--devices", "8", "--device-memory", "1GiB", "train.py")
    assert code == 0 and text.splitlines()[-1].split() == ["fits", "yes", "yes", "yes"]
    assert "net.*.* x 4" in text
    code, text, _ = tell("--devices", "8", "--device-memory", "14MiB", "train.py")
    *_, verdicts, advice = text.splitlines()
    assert code == 1 and re.fullmatch(r"  fits +the device lacks .* MiB +yes +yes", verdicts)
    assert "activations='host'" in advice
    code, text, _ = tell(
        "--devices", "8", "--device-memory", "14MiB", "--host-memory", "20MiB", "train.py"
    )
    assert code == 1 and text.count("the host lacks") == 2 and "yes" not in text


def test_a_step_that_asks_for_values(tell):
    code, text, traceback = tell("--devices", "2", "--device-memory", "1GiB", "train.py", "--asks")
    assert code == 2 and "without activations (DataDependentOutputException, see above)" in text
    line = 1 + SCRIPT.splitlines().index("        return loss if loss.item() > 0 else None")
    assert f'train.py", line {line}, in training_step' in traceback
    assert text.splitlines()[-1].split() == ["state", "fits", "yes", "yes", "yes"]
    code, text, _ = tell("--devices", "8", "--device-memory", "14MiB", "train.py", "--asks")
    assert code == 2 and "  state fits  " in text and "the device lacks" in text


def test_its_words_are_those_of_the_memory_tracker():
    told = plan(GRID[-3], 2)  # without offload
    assert told["most in a step"] > 0
    assert set(STRATEGY_CATEGORIES) <= {name.replace(" ", "_") for name in told}


def test_a_script_that_never_trains(tmp_path, capfd):
    (tmp_path / "idle.py").write_text("print('idle')")
    arguments = argparse.Namespace(script=[str(tmp_path / "idle.py"), "--later"], devices=2)
    assert run(arguments) == 2
    said = capfd.readouterr()
    assert said.out == "idle\n" and said.err.startswith("There is no plan: ")
    assert "idle.py --later has ended, and did not" in said.err
