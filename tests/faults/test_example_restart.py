"""The example as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "restart.py"


def test_restart(tmp_path):
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--max-restarts=1",
        str(EXAMPLE),
    ]
    done = subprocess.run(
        torchrun,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "Rank 1 died without a word" in done.stderr and "in forward" in done.stderr, done.stderr
    assert sorted(re.findall(r"begins at step (\d+)", done.stdout)) == ["0", "0", "10", "10"]
    assert re.findall(r"ends at step (\d+)", done.stdout) == ["20", "20"]
