"""`examples/offload.py` runs as it stands."""

import subprocess
import sys
from pathlib import Path


def test_the_example(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "offload.py"
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    _, *rows = done.stdout[done.stdout.index("offload ") :].splitlines()
    assert [row.split()[0] for row in rows[:6]] == [
        "None",
        "optimizer",
        "parameters",
        "4MiB",
        "parameters",
        "None",
    ]
    assert len({row.split()[2] for row in rows[:6]}) == 1, done.stdout
