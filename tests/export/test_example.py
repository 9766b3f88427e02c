"""The example trains, exports, and serves from a process without the package."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "export.py"


def test_it_serves_what_it_learned():
    run = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    served, made = (run.stdout.splitlines()[k] for k in (-3, -1))
    values = served.partition("[")[2].partition("]")[0].split(", ")
    assert all(abs(float(y) - x) < 1 for y, x in zip(values, (8, 16, 24), strict=True)), served
    assert made == "made of the checkpoint: the same file"
